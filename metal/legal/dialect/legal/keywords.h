// Metal's words in C++ for OpenCL. `device` and `threadgroup` are two spaces of OpenCL that have nothing in common; what
// names no space at all becomes `__generic`, which shows on the syntax tree. `threadgroup` is `__global`, not `__local`,
// because only that may be declared in a function that is no OpenCL kernel (as a static: text.py adds the word).
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#pragma OPENCL EXTENSION __cl_clang_bitfields : enable
#pragma OPENCL EXTENSION __cl_clang_variadic_functions : enable

#define __METAL__ 1
#define __METAL_MACOS__ 1
#define __HAVE_BFLOAT__ 1
#define __HAVE_SIMDGROUP_MATRIX__ 1
#ifdef LEGAL_METAL4
#define __METAL_VERSION__ 400
#else
#define __METAL_VERSION__ 310
#endif

#define device __local
#define threadgroup __global
#define constant __constant
#define thread __private
#define kernel __attribute__((annotate("metal kernel")))

// Words of OpenCL that are ordinary names in Metal.
#define global legal_name_global
#define local legal_name_local
#define generic legal_name_generic
#define read_only legal_name_read_only
#define write_only legal_name_write_only
#define read_write legal_name_read_write
#define pipe legal_name_pipe
#define vec_step legal_name_vec_step
#undef __OPENCL_VERSION__
#undef __OPENCL_CPP_VERSION__
#undef __OPENCL_C_VERSION__

#define METAL_FUNC inline
#define METAL_CONST_ARG(x)
