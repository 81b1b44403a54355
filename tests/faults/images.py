"""Faults of images in prompts: whose features, at which positions, and what is the same text."""

from __future__ import annotations

from tests.faults.planted import Fault

LAYOUT, SIGHT, READER = "cortexmlx/types/images.py", "cortexmlx/vision/sight.py", "cortexmlx/vision/reader.py"
PIXTRAL = "cortexmlx/vision/pixtral.py"
ADMISSION, SCHEDULER = "cortexmlx/scheduling/admission.py", "cortexmlx/scheduling/scheduler.py"
TOWERS = "cortexmlx/vision/towers.py"
BUILDER, IMAGES = "cortexmlx/scheduling/builder.py", "cortexmlx/vision/images.py"
ELSEWHERE = "cortexmlx/vision/elsewhere.py"
TESTS = (
    "vision/test_engine_images.py",
    "vision/test_qwen.py",
    "vision/test_images.py",
    "vision/test_pixtral.py",
    "vision/test_towers.py",
    "vision/test_trials.py",
    "vision/test_elsewhere.py",
    "cli/plan/test_run.py",
)

FAULTS = (
    Fault(
        "tokens of an answer forget the images before it", BUILDER, "images.positions_of(position, 1)[0, 0]", "position"
    ),
    Fault("the shift is one too small", LAYOUT, "self.positions.max()) + 1 -", "self.positions.max()) -"),
    Fault(
        "a piece begins with the image's first features", LAYOUT, "span.image, start - span.start)", "span.image, 0)"
    ),
    Fault(
        "features go to the step's first tokens",
        SIGHT,
        "embeddings[piece.begin : piece.end] =",
        "embeddings[: piece.end - piece.begin] =",
    ),
    Fault("rows and columns turn nothing", SIGHT, "None if axes is None else mx.array(", "None if True else mx.array("),
    Fault("inner features come a layer late", SIGHT, "out + self.deep[index]", "out + self.deep[index - 1]"),
    Fault("inner features are not added", SIGHT, "if index < len(self.deep) else out", "if index < 0 else out"),
    Fault(
        "a step's inner features stay for the next",
        SIGHT,
        "        self.deep = []\n\n    def install",
        "\n    def install",
    ),
    Fault("all images of a size are one text", LAYOUT, "shake_256(key)", "shake_256(b'')"),
    Fault(
        "an image's key leaves out the processor", IMAGES, "sha256(image.digest + self.digest)", "sha256(image.digest)"
    ),
    Fault("a request does not wait for its images", ADMISSION, "return self.request_features(", "return None and ("),
    Fault("what is cached of an image is looked at again", ADMISSION, "if span.end > cached]", "]"),
    Fault(
        "images that are dropped meanwhile are looked at twice", SIGHT, "if wanted and size > FEATURE_BYTES", "if False"
    ),
    Fault(
        "nothing bounds what is remembered", READER, "_bytes_of(self._by_source.values()) > REMEMBERED_BYTES", "False"
    ),
    Fault("the end of a row gets features", SIGHT, "mx.where(is_image, seen, ", "mx.where(True, seen, "),
    Fault("the last row ends as others do", LAYOUT, "(*ended[:-1], self.row_ends[1])", "tuple(ended)"),
    Fault("rows and columns turn at the same rates", PIXTRAL, "column * rates[1::2]", "column * rates[::2]"),
    Fault("a token's patches are joined one by one", PIXTRAL, ".swapaxes(1, 2).flatten(1)", ".flatten(1)"),
    Fault("features have no place for the ends of rows", PIXTRAL, "[(0, 0), (0, 1), (0, 0)]", "[(0, 0)] * 3"),
    Fault("one text and one image stay as they came", READER, "if shows == [False, True]", "if False"),
    Fault("the ends of rows are not counted", IMAGES, "return rows * (columns + 1)", "return rows * columns"),
    Fault("nothing bounds a prompt's images", READER, "_bytes_of(written) > PROMPT_BYTES", "False"),
    Fault("a link leads out of the folder", ELSEWHERE, "path.is_relative_to(os.path.realpath(root))", "True"),
    Fault(
        "a name is looked up a second time",
        ELSEWHERE,
        "create_connection((address, port)",
        "create_connection((host, port)",
    ),
    Fault("hosts of private networks are asked", ELSEWHERE, "if address.is_global and", "if"),
    Fault("every host is asked", ELSEWHERE, "if origin not in self._hosts:", "if False:"),
    Fault("a host may take its time", ELSEWHERE, "    cut.start()\n", ""),
    Fault(
        "the largest image takes nothing",
        "cortexmlx/execution/sight_memory.py",
        "image = peak_bytes(graph, waits=True) + untraced + patches.nbytes",
        "image = 0",
    ),
    Fault("a tower takes all the time it needs", TOWERS, "time.perf_counter() - begin >= until:", "0 > until:"),
    Fault("frames see the first one only", TOWERS, "each[first : first + frame] for", "each[:frame] for"),
    Fault("a piece is all rows", TOWERS, "made = make(*(array[at : at + count] for", "made = make(*(array[at:] for"),
    Fault("packed weights count for less", TOWERS, '* 32 // getattr(each, "bits", 32)', ""),
    Fault(
        "a row goes on without an image's features",
        SCHEDULER,
        "lambda image: request_features([image]) is None",
        "lambda _: True",
    ),
    Fault(
        "features that a row needs are dropped for others",
        SIGHT,
        "if kept and size + kept > FEATURE_BYTES:",
        "if False:",
    ),
)
