// simdgroup_matrix 8x8, two elements a lane. Lane l holds row (l/4 & 4) + (l/2 % 4), columns (l/4 & 2) * 2 + (l % 2) * 2 and
// the next one: Apple's layout, on which MLX's steel kernels rely.
#pragma once
#include "sim/simd.h"

namespace metal {
SIM_FN constexpr uint __matrix_row(uint lane) { return ((lane / 4) & 4) + ((lane / 2) % 4); }
SIM_FN constexpr uint __matrix_col(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }
SIM_FN constexpr uint __matrix_lane(uint row, uint col) {
  return (row & 4) * 4 + (col & 4) * 2 + (row & 3) * 2 + ((col & 2) >> 1);
}

template <class T, int Rows = 8, int Cols = 8> struct simdgroup_matrix {
  static_assert(Rows == 8 && Cols == 8, "Apple GPUs have 8x8 simdgroup matrices");
  typedef vec<T, 2> storage_type;
  storage_type __elements;
  simdgroup_matrix() = default;
  SIM_FN explicit simdgroup_matrix(T diagonal) {
    uint r = __matrix_row(__lane()), c = __matrix_col(__lane());
    __elements = storage_type{r == c ? diagonal : T(0), r == c + 1 ? diagonal : T(0)};
  }
  SIM_FN storage_type& thread_elements() { return __elements; }
  SIM_FN const storage_type& thread_elements() const { return __elements; }
  template <class B> friend SIM_FN simdgroup_matrix operator*(const simdgroup_matrix& a, const simdgroup_matrix<B, 8, 8>& b) {
    simdgroup_matrix d; simdgroup_multiply(d, a, b); return d; }
};
template <class T, int R, int C> SIM_FN simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m; m.__elements = vec<T, 2>(value); return m; }

SIM_FN void __whole_simdgroup(__exchange e) {
  for (uint i = 0; i < SIM_LANES; ++i) if (!((e->active >> i) & 1)) { sim_inactive_lane(i); return; }
}
template <class T, int R, int C, class P>
SIM_FN void simdgroup_load(simdgroup_matrix<T, R, C>& m, P source, ulong stride = 8, ulong2 origin = 0, bool transpose = false, SIM_AT) {
  __whole_simdgroup(__meet(at, true, SIM_OP_MATRIX_LOAD));
  ulong row = __matrix_row(__lane()), col = __matrix_col(__lane());
  for (uint i = 0; i < 2; ++i) {
    ulong r = transpose ? col + i : row, c = transpose ? row : col + i;
    m.__elements[i] = T(source[(origin[1] + r) * stride + origin[0] + c]);
  }
}
template <class T, int R, int C, class P>
SIM_FN void simdgroup_store(simdgroup_matrix<T, R, C> m, P target, ulong stride = 8, ulong2 origin = 0, bool transpose = false, SIM_AT) {
  __whole_simdgroup(__meet(at, true, SIM_OP_MATRIX_STORE));
  ulong row = __matrix_row(__lane()), col = __matrix_col(__lane());
  for (uint i = 0; i < 2; ++i) {
    ulong r = transpose ? col + i : row, c = transpose ? row : col + i;
    target[(origin[1] + r) * stride + origin[0] + c] = m.__elements[i];
  }
}
template <class D, class A, class B, class C>
SIM_FN void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, SIM_AT) {
  static_assert(is_same_v<A, B> || is_same_v<A, float> || is_same_v<B, float>, "a compiler may refuse halves times bfloats");
  struct Operands { vec<A, 2> a; vec<B, 2> b; };
  __exchange e = __meet(at, Operands{a.__elements, b.__elements}, SIM_OP_MATRIX_MULTIPLY);
  __whole_simdgroup(e);
  const uint row = __matrix_row(__lane()), col = __matrix_col(__lane());
  float sum0 = float(c.__elements[0]), sum1 = float(c.__elements[1]);
  for (uint k = 0; k < 8; ++k) {
    float left = float(__slot<Operands>(e, __matrix_lane(row, k)).a[k & 1]);
    vec<B, 2> right = __slot<Operands>(e, __matrix_lane(k, col)).b;
    sum0 = __builtin_fmaf(left, float(right[0]), sum0);
    sum1 = __builtin_fmaf(left, float(right[1]), sum1);
  }
  d.__elements = vec<D, 2>{D(sum0), D(sum1)};
}
template <class D, class A, class B>
SIM_FN void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, SIM_AT) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), at);
}
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
}  // namespace metal
