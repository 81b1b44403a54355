"""What Mesa's compiler for Apple GPUs makes of the kernels; and the kernels as files for Apple's own."""
