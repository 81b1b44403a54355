"""The C++ translation unit of a kernel: MLX's preamble, the rewritten text, and an entry point that calls it."""

import re
from collections.abc import Sequence

from cortexmlx.metal.lab.legal.msl import PREAMBLE
from cortexmlx.metal.lab.sim.translation.rewrite import to_cpp
from cortexmlx.metal.lab.sim.translation.source import KernelText, Role

_ATTRIBUTE_VALUES = {
    "dispatch_quadgroups_per_threadgroup": "t->dispatch_simdgroups * 8",
    "dispatch_simdgroups_per_threadgroup": "t->dispatch_simdgroups",
    "dispatch_threads_per_threadgroup": "SIM_3(t->dispatch_threads_per_threadgroup)",
    "grid_origin": "uint3{0, 0, 0}",
    "grid_size": "SIM_3(t->threads_per_grid)",
    "quadgroup_index_in_threadgroup": "t->index_in_threadgroup / 4",
    "quadgroups_per_threadgroup": "t->simdgroups * 8",
    "simdgroup_index_in_threadgroup": "t->simdgroup",
    "simdgroups_per_threadgroup": "t->simdgroups",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "t->index_in_threadgroup % 4",
    "thread_index_in_simdgroup": "t->lane",
    "thread_index_in_threadgroup": "t->index_in_threadgroup",
    "thread_position_in_grid": "SIM_3(t->position_in_grid)",
    "thread_position_in_threadgroup": "SIM_3(t->position_in_threadgroup)",
    "threadgroup_position_in_grid": "SIM_3(t->group_position_in_grid)",
    "threadgroups_per_grid": "SIM_3(t->threadgroups_per_grid)",
    "threads_per_grid": "SIM_3(t->threads_per_grid)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "SIM_3(t->threads_per_threadgroup)",
}


def attribute_value(attribute: str) -> str:
    """Return a C++ expression for one of Metal's thread attributes. It reads `t`, the running thread."""
    return _ATTRIBUTE_VALUES[attribute]


def entry_point(instance: str, arguments: Sequence[str]) -> str:
    """Return the C++ function that the runtime calls on every thread's stack.

    `arguments` may use `b` (buffers) and `t` (thread).
    """
    function = re.split(r"[<\s]", instance)[0]
    return (
        '\n#line 1 "entry"\n'
        f'extern "C" const char sim_kernel_function[] = "{function}";\n'
        "#define SIM_3(a) uint3{a[0], a[1], a[2]}\n"
        'extern "C" void sim_kernel_entry(void* const* buffers) {\n'
        "  void* const SIM_HIDDEN* b = (void* const SIM_HIDDEN*)buffers;\n"
        "  const SIM_HIDDEN SimThread* t = (const SIM_HIDDEN SimThread*)sim_thread();\n"
        f"  {instance}(\n      " + ",\n      ".join(arguments) + ");\n}\n"
    )


def translation_unit(kernel: KernelText) -> str:
    """Return the C++ text of a kernel of `mx.fast.metal_kernel`. Line 1 of its file "kernel" is line 1 of the kernel's
    text.
    """
    arguments = []
    for p in kernel.buffers:
        const = "" if p.role is Role.OUTPUT else "const "
        pointer = f"({const}{p.element}*)b[{p.index}]"
        arguments.append(f"*{pointer}" if p.reference else pointer)
    arguments += [attribute_value(a) for a in kernel.attributes]
    return PREAMBLE + '#line 1 "kernel"\n' + to_cpp(kernel.text) + entry_point(kernel.instance, arguments)
