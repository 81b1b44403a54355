// For loops over a thread's arrays: unrolled, so that the arrays stay in registers.
#ifndef UNROLL
#define UNROLL _Pragma("clang loop unroll(full)")
#endif
