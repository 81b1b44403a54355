// Which numbers of a matrix a lane has: those in `row`, at `column` and `column + 1`.
struct MatrixPlace {
  int row;
  int column;
};

inline MatrixPlace matrix_place(uint lane) {
  return MatrixPlace{int((lane >> 2 & 4) + (lane >> 1 & 3)), int((lane >> 1 & 4) + (lane << 1 & 2))};
}

// What a matrix has that is multiplied by one of Other: halves and bfloats are never multiplied by each other, and float has
// all numbers of both.
template <typename T, typename Other>
struct Factor {
  typedef float type;
};
template <typename T>
struct Factor<T, T> {
  typedef T type;
};

// The largest of a column's eight numbers, and their sum: over the lanes that differ in the bits of the row.
inline float max_over_rows(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(2)));
  x = max(x, simd_shuffle_xor(x, ushort(4)));
  return max(x, simd_shuffle_xor(x, ushort(16)));
}

inline float sum_over_rows(float x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}
