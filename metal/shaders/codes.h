// What a code c stands for, of the half 2^BITS + c.
struct Group {
  float scale;
  float bias;
};

template <int BITS, typename KV>
inline Group group_of(KV scale, KV bias) {
  return Group{float(scale), fma(float(scale), -float(1 << BITS), float(bias))};
}

// The k-th codes of two times 16 bits, each as the bits of a half.
template <int BITS>
inline uint two_codes(uint bits, int k) {
  constexpr uint FRACTION = ((1u << BITS) - 1) << (10 - BITS);
  constexpr uint POWER = uint(BITS + 15) << 10;
  const int shift = k * BITS - (10 - BITS);
  const uint fractions = shift < 0 ? bits << -shift : bits >> shift;
  return (fractions & (FRACTION * 0x10001u)) | (POWER * 0x10001u);
}
