"""The simulator's kernel text is MLX's, character by character: MLX prints it while a call is exported."""

import itertools

import mlx.core as mx
import pytest

from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.sim.source import ATTRIBUTES

DTYPES = [
    mx.bool_,
    mx.uint8,
    mx.uint16,
    mx.uint32,
    mx.uint64,
    mx.int8,
    mx.int16,
    mx.int32,
    mx.int64,
    mx.float16,
    mx.bfloat16,
    mx.float32,
    mx.complex64,
]
INDEX = "thread_position_in_grid.x"


def printed_by_mlx(tmp_path, capfd, arguments, inputs, outputs, template):
    kernel = mx.fast.metal_kernel(**arguments)

    def call(*arrays):
        extra = {"template": template} if template else {}
        return kernel(
            inputs=list(arrays),
            grid=(16, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=[(16,)] * len(outputs),
            output_dtypes=outputs,
            verbose=True,
            **extra,
        )

    capfd.readouterr()
    mx.export_function(str(tmp_path / "call.mlxfn"), call, *inputs)
    return capfd.readouterr().out


def assert_same_text(tmp_path, capfd, *, inputs, source, outputs=(mx.float32,), template=None, names=None, **more):
    arguments = {
        "name": "probe",
        "input_names": names or [f"operand_{i}" for i in range(len(inputs))],
        "output_names": [f"result_{i}" for i in range(len(outputs))],
        "source": source,
        **more,
    }
    expected = printed_by_mlx(tmp_path, capfd, arguments, inputs, list(outputs), template)
    kernel = sim.metal_kernel(**arguments)
    ours = kernel.text(inputs, list(outputs), template).text
    assert f"Generated source code for `{arguments['name']}`:\n```\n{ours}\n```\n" == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_as_input_output_and_template_argument(tmp_path, capfd, dtype):
    assert_same_text(
        tmp_path,
        capfd,
        inputs=[mx.zeros((9,)).astype(dtype), mx.zeros((2, 2)).astype(dtype), mx.array(1).astype(dtype)],
        outputs=[dtype, mx.int8],
        template=[("T", dtype), ("N", 3)],
        source=f"result_0[{INDEX}] = operand_0[0];",
    )


BODIES = ("", "operand_0_shape", "operand_0_strides", "operand_0_ndim")


@pytest.mark.parametrize("body", [*BODIES, "operand_0_ndim operand_0_strides operand_0_shape result_0_shape"])
def test_address_space_and_metadata_follow_size_and_body(tmp_path, capfd, body):
    source = f"result_0[{INDEX}] = operand_0[0]; // {body}"
    for shape in ((), (1,), (7,), (8,), (0,), (0, 3), (2, 3), (2, 4), (1, 1, 1), (3, 1, 5, 2)):
        assert_same_text(tmp_path, capfd, inputs=[mx.zeros(shape), mx.zeros((9,))], source=source)


def test_each_attribute_is_found_in_the_body(tmp_path, capfd):
    for attribute in ATTRIBUTES:
        assert_same_text(tmp_path, capfd, inputs=[mx.zeros((9,))], source=f"result_0[0] = {attribute};")


def test_all_attributes_come_in_mlx_order_whatever_the_order_in_the_body(tmp_path, capfd):
    source = "\n".join(reversed(ATTRIBUTES))
    assert_same_text(tmp_path, capfd, inputs=[mx.zeros((9,))], source=source)


def test_the_header_is_not_scanned_for_names(tmp_path, capfd):
    header = "// thread_position_in_grid operand_0_shape\n#define TWICE(x) (2 * (x))"
    assert_same_text(tmp_path, capfd, inputs=[mx.zeros((9,))], source="result_0[0] = 1;", header=header)
    assert_same_text(tmp_path, capfd, inputs=[mx.zeros((9,))], source="result_0[0] = 1;", header=header + "\n")


@pytest.mark.parametrize(
    "template", [[("N", -4)], [("B", True), ("C", False)], [("T", mx.bfloat16), ("N", 123456)], []]
)
@pytest.mark.parametrize("atomic", [False, True])
def test_template_values_and_atomic_outputs(tmp_path, capfd, template, atomic):
    assert_same_text(
        tmp_path,
        capfd,
        inputs=[mx.zeros((9,))],
        outputs=[mx.float32, mx.int32],
        source="result_0[0] = 1;",
        template=template,
        atomic_outputs=atomic,
        ensure_row_contiguous=False,
    )


def test_a_name_that_is_part_of_another_brings_in_its_metadata_too(tmp_path, capfd):
    assert_same_text(
        tmp_path,
        capfd,
        inputs=[mx.zeros((9,)), mx.zeros((2, 9))],
        names=["a", "ba"],
        source="result_0[0] = ba_shape[0];",
    )


def test_no_inputs(tmp_path, capfd):
    assert_same_text(tmp_path, capfd, inputs=[], source="result_0[0] = 1;")


def test_verbose_prints_what_mlx_prints(tmp_path, capfd):
    arguments = {"name": "probe", "input_names": ["x"], "output_names": ["y"], "source": f"y[{INDEX}] = x[{INDEX}];"}
    expected = printed_by_mlx(tmp_path, capfd, arguments, [mx.ones((16,))], [mx.float32], None)
    sim.metal_kernel(**arguments)(
        inputs=[mx.ones((16,))],
        grid=(16, 1, 1),
        threadgroup=(8, 1, 1),
        output_shapes=[(16,)],
        output_dtypes=[mx.float32],
        verbose=True,
    )
    assert capfd.readouterr().out == expected


def test_attributes_are_not_missed_when_two_share_a_name(tmp_path, capfd):
    for pair in itertools.combinations(list(ATTRIBUTES)[:6], 2):
        assert_same_text(tmp_path, capfd, inputs=[mx.zeros((9,))], source=" ".join(pair))
