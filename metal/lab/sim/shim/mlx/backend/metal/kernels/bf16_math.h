// MLX teaches its Metal library math on bfloat here; this library knows it already (sim/math.h, sim/simd.h).
#pragma once
