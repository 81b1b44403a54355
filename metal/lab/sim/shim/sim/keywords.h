// The language's keywords, last: nothing above may use them as words of its own. To run, the address spaces vanish (threadgroup
// variables have been rewritten before); for the address-space pass each is one of clang's.
#pragma once

#define __METAL__ 1
#define __METAL_MACOS__ 1
#define __METAL_VERSION__ 320
#define __HAVE_BFLOAT__ 1
#define assert(...) ((__VA_ARGS__) ? (void)0 : sim_assertion(#__VA_ARGS__))
#define kernel
#define device
#define constant const
#define threadgroup
#define thread

// A pointer parameter that brings the size of what it points to (cpp.py): indices of it are checked like an array's.
#define SIM_SIZED __attribute__((pass_object_size(1)))

// A variable in threadgroup memory: one for all threads of the threadgroup. Its declaration makes an entry in a table, run or not.
#define SIM_UNWRAP(...) __VA_ARGS__
#define SIM_THREADGROUP(name, type, dims, ...)                                                             \
  typedef SIM_UNWRAP type sim_type_##name dims;                                                            \
  struct sim_aligned_##name { __VA_ARGS__ sim_type_##name sim_value; };                                    \
  static SimArray sim_array_##name SIM_ARRAY_TABLE = {                                                     \
      nullptr, sizeof(sim_type_##name), alignof(sim_aligned_##name), #name, __func__};                        \
  sim_type_##name& name = *(sim_type_##name*)((SIM_HIDDEN SimArray*)&sim_array_##name)->base;
// Its initial value, which every thread writes where it comes by.
#define SIM_INITIAL(name, ...) { const sim_type_##name sim_value __VA_ARGS__; metal::__copy_into(name, sim_value); }
