"""Faults of Gemma's sight: who sees whom among an image's tokens, and what its towers compute."""

from __future__ import annotations

from tests.faults.planted import Fault

LAYOUT, GEMMA = "cortexmlx/types/images.py", "cortexmlx/vision/gemma.py"
SCHEDULER, METAL = "cortexmlx/scheduling/scheduler.py", "cortexmlx/attention/metal.py"
TESTS = ("attention/test_bidirectional.py", "vision/test_gemma.py")

FAULTS = (
    Fault(
        "text before an image sees it",
        LAYOUT,
        "yield begin, span.start, False",
        "yield begin, span.end, True\n                    begin = span.end\n                    continue",
    ),
    Fault("text after an image sees later text", LAYOUT, "yield begin, end, False", "yield begin, end, True"),
    Fault(
        "an image is cut in two pieces",
        LAYOUT,
        "return (span.start if first < span.start else span.end) - first",
        "return count",
    ),
    Fault(
        "layers without a window see both ways, too",
        LAYOUT,
        "BidirectionalLayers.WINDOWED and has_window",
        "BidirectionalLayers.WINDOWED",
    ),
    Fault(
        "images that see both ways share a step that has no room for both",
        SCHEDULER,
        "if count > budget and prefill_counts:",
        "if False:",
    ),
    Fault(
        "an image without memory fails everybody",
        SCHEDULER,
        "        except KVCacheFull:\n            self._end_stuck_job(job)\n",
        "        finally:\n            pass\n",
    ),
    Fault(
        "short images are computed with other short pieces",
        "cortexmlx/attention/reference_step.py",
        "<= MAX_SHORT_TOKENS and not piece.bidirectional",
        "<= MAX_SHORT_TOKENS",
    ),
    Fault(
        "a part of an image does not see what is after it",
        "cortexmlx/attention/reference.py",
        "seen = piece.tokens if piece.bidirectional else last",
        "seen = last",
    ),
    Fault("kernels compute images", METAL, "if piece.bidirectional:  # the", "if False:  # the"),
    Fault("short images become rows of kernels", METAL, "[piece.bidirectional or piece.end", "[piece.end"),
    Fault("the language model scales features", GEMMA, "(states, None, eps)) / scale", "(states, None, eps))"),
    Fault("the older language model scales features", GEMMA, "seen / self._scale.astype(weight.dtype)", "seen"),
    Fault(
        "an image's tokens have inputs of each layer of another token",
        "cortexmlx/execution/runner.py",
        "mx.maximum(tokens, 0)",
        "mx.maximum(tokens, 1)",
    ),
    Fault(
        "rows and columns turn each other's half",
        GEMMA,
        "np.stack([column, row], axis=1)",
        "np.stack([row, column], 1)",
    ),
    Fault("learned positions are of the other side", GEMMA, "table[0, column]", "table[1, column]"),
    Fault(
        "nothing bounds what a layer writes",
        GEMMA,
        "return mx.clip(self.linear(bounded), self.output_min, self.output_max)",
        "return self.linear(bounded)",
    ),
    Fault("features are not standardized", GEMMA, 'if "std_bias" in self:', "if False:"),
    Fault(
        "an image larger than a step is promised",
        "cortexmlx/vision/families.py",
        "max_tokens = min(max_tokens, step_tokens)",
        "max_tokens = max_tokens - 1",
    ),
    Fault(
        "what stands around an image may be trimmed",
        "cortexmlx/vision/reader.py",
        '"content": list(map(_trim, content))',
        '"content": content',
    ),
)
