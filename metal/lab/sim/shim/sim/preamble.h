// What MLX puts before the text of every kernel: compiled once for all that a process builds.
#include "mlx/backend/metal/kernels/utils.h"
