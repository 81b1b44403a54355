"""What is changed in Mesa's source before its compiler for Apple GPUs is built: `python3 edits.py FOLDER`.

The command `asahi_clc` compiles the driver's own helper kernels. It refuses kernels that spill, prints the final
instructions among many other things, and makes of a `simd_shuffle_xor` a shuffle with a run-time lane, which costs many
times as much. It has no matrix instruction, which M1 and M2 have: here it gets one, of which the registers and the
number are right and nothing else is (no encoding, no latency).

Each edit names a text that must be there once; a source without it is refused, not half edited. Nothing is imported but
the standard library: the script runs wherever the build does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """Text `put` in the place of the text `at`, which stands in `path` once."""

    path: str
    at: str
    put: str


EDITS = (
    # Kernels that spill are compiled, too: how much they spill is what we want to know.
    Edit("src/asahi/clc/asahi_clc.c", ".is_helper = is_helper,", ".is_helper = is_helper, .has_scratch = true,"),
    Edit("src/asahi/clc/asahi_clc.c", "assert(compiled.info.scratch_size == 0 &&", "assert(true ||"),
    Edit("src/asahi/clc/asahi_clc.c", "assert(compiled.info.preamble_scratch_size == 0 &&", "assert(true ||"),
    # The last form of a kernel, between two lines that are easy to find.
    Edit(
        "src/asahi/compiler/agx_compile.c",
        "   agx_lower_pseudo(ctx);\n",
        """   agx_lower_pseudo(ctx);
   if (agx_should_dump(nir, AGX_DBG_SHADERS)) {
      printf("=== FINAL %s %s\\n", nir->info.name, ctx->is_preamble ? "preamble" : "main");
      agx_print_shader(ctx, stdout);
      printf("=== END\\n");
   }
""",
    ),
    # A shuffle by a constant exclusive or is an instruction of its own.
    Edit(
        "src/asahi/compiler/agx_compile.c",
        "   case nir_intrinsic_quad_swap_horizontal: {\n",
        """   case nir_intrinsic_shuffle_xor:
      return agx_shuffle_xor_to(b, dst, agx_src_index(&instr->src[0]),
                                agx_immediate(nir_src_as_uint(instr->src[1])));

   case nir_intrinsic_quad_swap_horizontal: {
""",
    ),
    Edit(
        "src/asahi/compiler/agx_nir_lower_subgroups.c",
        "   /* Use default behaviour for everything but scans */\n",
        """   if (instr->type == nir_instr_type_intrinsic) {
      nir_intrinsic_instr *shuffle = nir_instr_as_intrinsic(instr);
      if (shuffle->intrinsic == nir_intrinsic_shuffle_xor && shuffle->def.num_components == 1 &&
          shuffle->def.bit_size == 32 && nir_src_is_const(shuffle->src[1]))
         return false;
   }

   /* Use default behaviour for everything but scans */
""",
    ),
    # simdgroup_matrix: a pair of numbers per lane each for two factors and a summand gives a pair for the sum.
    Edit(
        "src/compiler/nir/nir_intrinsics.py",
        'intrinsic("ballot", src_comp=[1], dest_comp=0, flags=[CAN_ELIMINATE])\n',
        """intrinsic("ballot", src_comp=[1], dest_comp=0, flags=[CAN_ELIMINATE])
intrinsic("simd_matrix_agx", src_comp=[2, 2, 2], dest_comp=2, flags=[CAN_ELIMINATE])
""",
    ),
    Edit(
        "src/compiler/nir/nir_divergence_analysis.c",
        "   case nir_intrinsic_shuffle_xor:\n",
        "   case nir_intrinsic_shuffle_xor:\n   case nir_intrinsic_simd_matrix_agx:\n",
    ),
    Edit(
        "src/asahi/compiler/agx_opcodes.py",
        'op("asr",\n',
        'op("simd_matrix", encoding = (0x0F | L, 0x7F | L, 8, _), srcs = 3)\n\nop("asr",\n',
    ),
    Edit(
        "src/asahi/compiler/agx_compile.c",
        "   case nir_intrinsic_quad_swap_diagonal: {\n",
        """   case nir_intrinsic_simd_matrix_agx:
      agx_simd_matrix_to(b, dst, agx_src_index(&instr->src[0]), agx_src_index(&instr->src[1]),
                         agx_src_index(&instr->src[2]));
      agx_emit_cached_split(b, dst, 2);
      return NULL;

   case nir_intrinsic_quad_swap_diagonal: {
""",
    ),
    Edit(
        "src/asahi/compiler/agx_validate.c",
        "   case AGX_OPCODE_LDCF:\n",
        """   case AGX_OPCODE_SIMD_MATRIX:
      return 2 * size;

   case AGX_OPCODE_LDCF:
""",
    ),
    Edit(
        "src/asahi/compiler/agx_validate.c",
        "   case AGX_OPCODE_UNIFORM_STORE:\n",
        """   case AGX_OPCODE_SIMD_MATRIX:
      return 2 * size;

   case AGX_OPCODE_UNIFORM_STORE:
""",
    ),
)


def apply(source: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Make the edits in a source tree; all of them, or none.

    Raises:
        ValueError: a file is missing, or the text of an edit does not stand in it exactly once.
    """
    texts: dict[Path, str] = {}
    for edit in edits:
        path = source / edit.path
        if path not in texts:
            if not path.is_file():
                raise ValueError(f"{edit.path} is not in {source}: is it Mesa's source?")
            texts[path] = path.read_text()
        if (found := texts[path].count(edit.at)) != 1:
            raise ValueError(f"{edit.path} has {found} times, not once, {edit.at.strip()!r}: another Mesa than 25.0")
        texts[path] = texts[path].replace(edit.at, edit.put)
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    try:
        apply(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
