"""Faults of speculation: costs that are not learned, losses that are not counted, chances that are not believed."""

from __future__ import annotations

from tests.faults.planted import Fault

COSTS, PURSE = "cortexmlx/speculation/costs.py", "cortexmlx/speculation/costs.py"
CHANCES, LENGTHS = "cortexmlx/speculation/speculation.py", "cortexmlx/speculation/speculation.py"
LEDGER, SPECULATION = "cortexmlx/speculation/costs.py", "cortexmlx/speculation/speculation.py"
LATENCY = "cortexmlx/scheduling/latency.py"

TESTS = ("speculation", "scheduling/test_latency.py", "scheduling/test_drafts.py")
"""The tests that judge these faults."""

FAULTS = (
    Fault("the purse has no bottom", PURSE, "loss <= max(self.level, 0.0)", "loss <= self.cap"),
    Fault("the purse saves without end", PURSE, "min(self.level + token_times, self.cap)", "self.level + token_times"),
    Fault("the purse is as small for many rows", LEDGER, "        self.loss_budget.cover(rows)\n", ""),
    Fault("the purse of many rows is filled again and again", PURSE, "        self.cap += more\n", ""),
    Fault(
        "steps of many rows forget what a few drafts cost",
        COSTS,
        "max(round_to_bucket(tokens), rows + 1)",
        "round_to_bucket(tokens)",
    ),
    Fault("the purse is never filled", PURSE, "self.add_gain(BUDGET_REFILL * tokens)", "self.add_gain(0 * tokens)"),
    Fault(
        "a verifying step's loss is not counted",
        LEDGER,
        "self.loss_budget.add_gain(rows + num_accepted -",
        "self.loss_budget.add_gain(0 *",
    ),
    Fault("a switch's loss is not counted", LEDGER, "            self.loss_budget.add_gain(-delay)\n", ""),
    Fault(
        "a switch costs nothing",
        LEDGER,
        "self.switch_cost * decode_time - decode_time if pending",
        "-decode_time if pending",
    ),
    Fault("the first step of a pipeline counts double", LEDGER, "            delay -= self._early_time\n", ""),
    Fault(
        "steps at the end of a pipeline teach what decoding costs", LEDGER, "(planned_ahead and not is_newest)", "True"
    ),
    Fault("nobody looks what decoding costs meanwhile", LEDGER, "or self._is_decode_time_old", ""),
    Fault("a slow step counts whole", COSTS, "median_low(self._values)", "max(self._values)"),
    Fault("an estimate is never forgotten", COSTS, "now - self.last_step <= (_LATE", "now >= 0 or (_LATE"),
    Fault("the machine's speed is not followed", COSTS, "self.unit *= min", "self.unit *= 1.0 or min"),
    Fault("costs are those of other rows", COSTS, "self._verify_estimates.get(round_to_bucket(rows), {}), ", "{}, "),
    Fault(
        "costs go on as they please",
        COSTS,
        "min(max_drafts, max(first_limit, 2 * (max(known_times) - rows)))",
        "max_drafts",
    ),
    Fault(
        "only the first length that pays", LENGTHS, "gain > best_gain and", "gain > best_gain and not best_count and"
    ),
    Fault("a row's tokens one by one", LENGTHS, "candidates = sorted(\n        (", "candidates = list(("),
    Fault("streaks never end", CHANCES, "streak + 1 if is_right else 0", "streak + 1"),
    Fault("a row is like all others", CHANCES, "mean if job_rate is None else job_rate.mean(mean, _OF_ALL)", "mean"),
    Fault("wrong guesses stay", SPECULATION, "            if not is_right:", "            if False:"),
    Fault(
        "a guess is judged by tokens that are gone",
        SPECULATION,
        "num_new - guess.num_confirmed > len(job.tokens)",
        "False",
    ),
    Fault("rows that failed stay", SPECULATION, "        self.acceptance_rates.forget_rows()\n", ""),
    Fault(
        "a guess is judged by another token",
        SPECULATION,
        "job.tokens[position - num_new] ==",
        "job.tokens[position - num_new - 1] ==",
    ),
    Fault("the token in flight is verified, too", SPECULATION, "tokens, place)[pending:]", "tokens, place)"),
    Fault("drafts of others are dropped", SPECULATION, " if not job.drafts or job.id in self._drafted_jobs]", "]"),
    Fault(
        "a slow drafter is asked at each step",
        SPECULATION,
        "is_due = self.ledger.tokens >=",
        "is_due = True or self.ledger.tokens >=",
    ),
    Fault(
        "a slow drafter's time is free",
        SPECULATION,
        "best_length, best_gain = 0, GO_ON * prices.decode_time\n",
        "best_length, best_gain = 1, 1e9\n",
    ),
    Fault(
        "everybody is asked though nothing pays",
        SPECULATION,
        "prices is not None and prices.can_pay:",
        "prices is not None:",
    ),
    Fault(
        "verification feeds the estimate for prompts",
        LATENCY,
        "plan.loads or all(",
        "not plan.segments and all(",
    ),
    Fault(
        "drafted tokens count as a prompt's",
        LATENCY,
        "self.observe(undrafted_tokens, seconds * undrafted_tokens / tokens)",
        "self.observe(undrafted_tokens, seconds)",
    ),
)
