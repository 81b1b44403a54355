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
#define atomic_int legal_name_atomic_int
#define atomic_uint legal_name_atomic_uint
#define atomic_long legal_name_atomic_long
#define atomic_ulong legal_name_atomic_ulong
#define atomic_float legal_name_atomic_float
#define atomic_double legal_name_atomic_double
#define atomic_flag legal_name_atomic_flag
#define atomic_size_t legal_name_atomic_size_t
#define atomic_intptr_t legal_name_atomic_intptr_t
#define atomic_uintptr_t legal_name_atomic_uintptr_t
#define atomic_ptrdiff_t legal_name_atomic_ptrdiff_t
#define event_t legal_name_event_t
#define clk_event_t legal_name_clk_event_t
#define queue_t legal_name_queue_t
#define reserve_id_t legal_name_reserve_id_t
#define sampler_t legal_name_sampler_t
#define ndrange_t legal_name_ndrange_t
#define image1d_t legal_name_image1d_t
#define image2d_t legal_name_image2d_t
#define image3d_t legal_name_image3d_t
#undef __OPENCL_VERSION__
#undef __OPENCL_CPP_VERSION__
#undef __OPENCL_C_VERSION__

#define METAL_FUNC inline
#define METAL_CONST_ARG(x)
