"""Faults of adapters per request: another adapter's beginnings, slots mixed up, memory that goes under a request."""

from __future__ import annotations

from tests.faults.planted import Fault

FILES = "cortexmlx/models/adapters/files.py"
LOW_RANK = "cortexmlx/models/adapters/low_rank.py"
ROUTE = "cortexmlx/execution/adapters.py"
TABLES = "cortexmlx/execution/adapters.py"
PLACES = "cortexmlx/execution/adapters.py"
SERVED = "cortexmlx/execution/adapters.py"
REGISTRY = "cortexmlx/core/adapter_registry.py"
JOB = "cortexmlx/scheduling/job.py"
PREFIX = "cortexmlx/kv/prefix.py"

TESTS = (
    "models/adapters/test_low_rank.py",
    "execution/adapters",
    "core/test_registry.py",
    "core/test_adapters.py",
    "engine/test_adapters.py",
    "engine/test_adapters_trials.py",
)
"""The tests that judge these faults."""

FAULTS = (
    # what is cached
    Fault(
        "a beginning crosses adapters", JOB, "return self.salt if adapter is None else", "return self.salt if True else"
    ),
    Fault("all adapters share beginnings", PREFIX, "self._root_key(salt.client) + salt.adapter", "b'one'"),
    Fault(
        "clients share an adapter's beginnings",
        JOB,
        "AdapterSalt(adapter.digest, self.salt)",
        "AdapterSalt(adapter.digest, None)",
    ),
    Fault(
        "a row that begins again has the base's keys",
        "cortexmlx/scheduling/running.py",
        "num_sharable(len(job.tokens))], job.block_salt",
        "num_sharable(len(job.tokens))], job.salt",
    ),
    Fault("a pin is the base's", REGISTRY, "return AdapterSalt(self._keys[name].digest, client)", "return client"),
    Fault("an identity without B", LOW_RANK, "for array in pairs[name]:", "for array in pairs[name][:1]:"),
    # files that change while they are read
    Fault("half of an adapter is new", LOW_RANK, "    adapter.check_unchanged()\n", ""),
    Fault(
        "an adapter is of two folders",
        FILES,
        "given_folder, folder = folder, Path(os.path.realpath(folder))",
        "given_folder = folder",
    ),
    Fault(
        "a file's time ticks too seldom",
        FILES,
        "        time.sleep(_SETTLE_SECONDS)\n    raise",
        "        return stamp\n    raise",
    ),
    # slots
    Fault(
        "slots begin at 0",
        SERVED,
        "enumerate(self.numbers, 1):\n            slots",
        "enumerate(self.numbers):\n            slots",
    ),
    Fault("the last one is not where its slot is", SERVED, "= self.numbers[-1]", "= number"),
    Fault(
        "the slots of before are kept",
        SERVED,
        "        self._route_key = None\n        self._active",
        "        self._active",
    ),
    Fault(
        "a long run has the first token's slot",
        ROUTE,
        "Part(first, end, int(slots[first]))",
        "Part(first, end, int(slots[0]))",
    ),
    Fault(
        "short runs at the end are left out",
        ROUTE,
        "    if gathered_start < len(slots):",
        "    if gathered_start > len(slots):",
    ),
    Fault(
        "B is another slot's",
        TABLES,
        "mx.gather_mm(low_rank, self.b, rhs_indices=part.slots)",
        "mx.gather_mm(low_rank, self.b, rhs_indices=part.slots[::-1])",
    ),
    Fault("B is filled up at its beginning", TABLES, "[(0, rank - r), (0, 0)]", "[(rank - r, 0), (0, 0)]"),
    Fault(
        "views of the slot before",
        TABLES,
        "(a[slot : slot + 1].squeeze(0), b",
        "(a[slot - 1 : slot].squeeze(0) if slot else a[0], b",
    ),
    Fault(
        "a table changes before it has its memory",
        TABLES,
        "        mx.eval(views)\n        self.a, self.b, self._views = a, b, views",
        "        self.a, self.b, self._views = a, b, views\n        mx.eval(views)",
    ),
    Fault("a slot that was left over is the next one's", TABLES, "[self.a[:slots], padded_a", "[self.a, padded_a"),
    Fault(
        "a slot goes before all tables have its adapter elsewhere",
        SERVED,
        "                table.copy_slot(last, slot)\n            self.numbers[slot - 1] = self.numbers[-1]",
        "                self.numbers[slot - 1] = self.numbers[-1]\n                table.copy_slot(last, slot)",
    ),
    Fault(
        "slots that nobody uses stay", SERVED, "            table.keep_first(1 + len(self.numbers))", "            pass"
    ),
    Fault(
        "layers stay changed after an exception",
        SERVED,
        "        restore_classes(self._modules.values())",
        "        pass",
    ),
    Fault(
        "the scale is forgotten",
        LOW_RANK,
        "tensors[tensor_names[1]] * scale",
        "tensors[tensor_names[1]] * np.float32(1)",
    ),
    Fault(
        "a table is too narrow",
        SERVED,
        "return max(_MIN_RANK, 1 << (rank - 1).bit_length())",
        "return max(_MIN_RANK, 1 << rank.bit_length() - 1)",
    ),
    # steps
    Fault(
        "a dead lane names its adapter",
        "cortexmlx/scheduling/builder.py",
        "lane.job.adapter if i in jobs_by_lane else 0",
        "lane.job.adapter",
    ),
    Fault(
        "a step of prompts names none",
        "cortexmlx/scheduling/builder.py",
        "_adapter_numbers([job.adapter for job, _ in scheduled_tokens])",
        "None",
    ),
    Fault("rows are not brought together", JOB, "    return job.adapter\n", "    return 0\n"),
    Fault(
        "recurrent layers get the slots of the whole step",
        SERVED,
        "part = None if self._step is None else self._step.current_span",
        "part = None",
    ),
    Fault(
        "pieces look up the first one's slots",
        SERVED,
        "cached_part = self._parts.get((index, id(part)))",
        "cached_part = next(iter(self._parts.values()), None)",
    ),
    Fault(
        "what is not loaded is the base model",
        SERVED,
        "    if unknown_numbers := set(plan.adapters) - loaded_numbers - {0}:",
        "    if unknown_numbers := set[int]():",
    ),
    Fault(
        "modules stay changed after a step",
        PLACES,
        'set_attribute(module, "__class__", kind)',
        'set_attribute(module, "__class__", make_class(kind))',
    ),
    Fault(
        "the layer that gives the logits may have one",
        PLACES,
        "elif any(count != _ALL for count in module_uses[id(module)].tokens):",
        "elif False:",
    ),
    Fault(
        "layers whose weights are read may have one",
        PLACES,
        "        if module_uses[id(module)].read:",
        "        if False:",
    ),
    # coming and going
    Fault(
        "one in use goes at once", REGISTRY, "            if key.number not in used_numbers:", "            if True:"
    ),
    Fault(
        "one without a name stays for ever",
        REGISTRY,
        "        self._keys, self.infos = keys, MappingProxyType(infos)\n        self.free_unused(jobs)",
        "        self._keys, self.infos = keys, MappingProxyType(infos)",
    ),
    Fault(
        "nobody sweeps after the last request",
        "cortexmlx/core/open_requests.py",
        "            self._adapters.free_unused(self._scheduler.jobs)",
        "            pass",
    ),
    Fault(
        "a name that is loaded anew keeps its content",
        REGISTRY,
        "key = self._contents.get(adapter.digest)",
        "key = self._keys.get(name) or self._contents.get(adapter.digest)",
    ),
    Fault("the same content is in memory twice", REGISTRY, "key = self._contents.get(adapter.digest)", "key = None"),
    Fault(
        "content that is half gone is used again",
        REGISTRY,
        "self._pending_removals.append(self._contents.pop(key.digest).number)",
        "self._pending_removals.append(key.number)",
    ),
    Fault(
        "a number is given twice",
        REGISTRY,
        "            self._last_number += 1  #",
        "            self._last_number = 1  #",
    ),
    Fault(
        "there is no bound of adapters", REGISTRY, "if self.loaded_count - frees_old >= limits.adapters:", "if False:"
    ),
    Fault("what a name replaces counts", REGISTRY, "self.loaded_count - frees_old >=", "self.loaded_count >="),
    Fault("content with a second name is thought to leave", REGISTRY, ".count(key) == 1", ".count(key) >= 1"),
    Fault(
        "content with requests is thought to leave",
        REGISTRY,
        "self._is_only_name(name) and self._keys[name].number not in {job.adapter for job in jobs}",
        "self._is_only_name(name)",
    ),
    Fault("there is no bound of their memory", REGISTRY, "if needed_bytes > limits.bytes:", "if False:"),
    Fault(
        "a name that nobody has is the base model",
        "cortexmlx/core/submitter.py",
        "        if name not in loaded:",
        "        if name not in loaded:\n            return None\n        if False:",
    ),
)
