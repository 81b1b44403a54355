// Matrices: columns of vectors, stored one after the other; m[c] is a column, m[c][r] an element.
#pragma once
#include "sim/integer.h"

namespace metal {
template <class T, int Cols, int Rows> struct matrix {
  static_assert(Cols >= 2 && Cols <= 4 && Rows >= 2 && Rows <= 4, "a matrix has 2, 3 or 4 columns and rows");
  using __column = vec<T, Rows>;
  __column columns[Cols];

  matrix() = default;
  SIM_FN explicit constexpr matrix(T diagonal) : columns{} { for (int c = 0; c < Cols && c < Rows; ++c) columns[c][c] = diagonal; }
  // From its columns, or from all of its elements, column after column.
  template <class A, class B, class... R> SIM_FN constexpr matrix(A a, B b, R... rest) : columns{} {
    constexpr int given = 2 + sizeof...(R);
    if constexpr (__is_vec<A>) {
      static_assert(given == Cols, "one vector for each column");
      const __column list[] = {a, b, rest...};
      for (int c = 0; c < Cols; ++c) columns[c] = list[c];
    } else {
      static_assert(given == Cols * Rows, "one number for each element");
      const T list[] = {T(a), T(b), T(rest)...};
      for (int i = 0; i < Cols * Rows; ++i) columns[i / Rows][i % Rows] = list[i];
    }
  }
  template <class U> SIM_FN explicit constexpr matrix(const matrix<U, Cols, Rows>& m) : columns{} {
    for (int c = 0; c < Cols; ++c) columns[c] = __column(m.columns[c]); }
  SIM_FN __column& operator[](int c) { return columns[c]; }
  SIM_FN const __column& operator[](int c) const { return columns[c]; }

#define SIM_EACH(expr) matrix r; for (int c = 0; c < Cols; ++c) r.columns[c] = expr; return r;
  friend SIM_FN matrix operator+(const matrix& a, const matrix& b) { SIM_EACH(a.columns[c] + b.columns[c]) }
  friend SIM_FN matrix operator-(const matrix& a, const matrix& b) { SIM_EACH(a.columns[c] - b.columns[c]) }
  friend SIM_FN matrix operator*(const matrix& a, T s) { SIM_EACH(a.columns[c] * s) }
  friend SIM_FN matrix operator*(T s, const matrix& a) { SIM_EACH(a.columns[c] * s) }
#undef SIM_EACH
  friend SIM_FN __column operator*(const matrix& a, const vec<T, Cols>& v) {
    __column r = a.columns[0] * v[0]; for (int c = 1; c < Cols; ++c) r += a.columns[c] * v[c]; return r; }
  friend SIM_FN vec<T, Cols> operator*(const vec<T, Rows>& v, const matrix& a) {
    vec<T, Cols> r = {}; for (int c = 0; c < Cols; ++c) r[c] = dot(v, a.columns[c]); return r; }
  template <int K> friend SIM_FN matrix<T, K, Rows> operator*(const matrix& a, const matrix<T, K, Cols>& b) {
    matrix<T, K, Rows> r; for (int k = 0; k < K; ++k) r.columns[k] = a * b.columns[k]; return r; }
  friend SIM_FN matrix& operator+=(matrix& a, const matrix& b) { return a = a + b; }
  friend SIM_FN matrix& operator-=(matrix& a, const matrix& b) { return a = a - b; }
  template <class B> friend SIM_FN matrix& operator*=(matrix& a, const B& b) { return a = a * b; }
  friend SIM_FN bool operator==(const matrix& a, const matrix& b) {
    bool r = true; for (int c = 0; c < Cols; ++c) r &= all(a.columns[c] == b.columns[c]); return r; }
  friend SIM_FN bool operator!=(const matrix& a, const matrix& b) { return !(a == b); }
};

template <class T, int C, int R> SIM_FN matrix<T, R, C> transpose(const matrix<T, C, R>& m) {
  matrix<T, R, C> t; for (int c = 0; c < C; ++c) for (int r = 0; r < R; ++r) t.columns[r][c] = m.columns[c][r]; return t; }
template <class T> SIM_FN T determinant(const matrix<T, 2, 2>& m) { return m[0][0] * m[1][1] - m[1][0] * m[0][1]; }
template <class T> SIM_FN T determinant(const matrix<T, 3, 3>& m) { return dot(m[0], cross(m[1], m[2])); }
template <class T> SIM_FN T determinant(const matrix<T, 4, 4>& m) {
  T sum = T(0.0f);
  for (int k = 0; k < 4; ++k) {  // along the first row: a column's element, and what is left without both
    matrix<T, 3, 3> left;
    for (int c = 0; c < 3; ++c) { const vec<T, 4>& from = m[c < k ? c : c + 1]; left[c] = vec<T, 3>(from[1], from[2], from[3]); }
    const T part = m[k][0] * determinant(left);
    sum = k % 2 ? sum - part : sum + part;
  }
  return sum;
}
}  // namespace metal

#define SIM_MATRICES(T)                                                                                             \
  typedef metal::matrix<T, 2, 2> T##2x2; typedef metal::matrix<T, 2, 3> T##2x3; typedef metal::matrix<T, 2, 4> T##2x4; \
  typedef metal::matrix<T, 3, 2> T##3x2; typedef metal::matrix<T, 3, 3> T##3x3; typedef metal::matrix<T, 3, 4> T##3x4; \
  typedef metal::matrix<T, 4, 2> T##4x2; typedef metal::matrix<T, 4, 3> T##4x3; typedef metal::matrix<T, 4, 4> T##4x4; \
  namespace metal { using ::T##2x2; using ::T##2x3; using ::T##2x4; using ::T##3x2; using ::T##3x3; using ::T##3x4;    \
  using ::T##4x2; using ::T##4x3; using ::T##4x4; }
SIM_MATRICES(float) SIM_MATRICES(half)
#undef SIM_MATRICES
