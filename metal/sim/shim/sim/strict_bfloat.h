// bfloat by the language's rules, for the static pass: it becomes float by itself, but no float or half becomes a bfloat
// without being asked. (The code that runs uses the compiler's own type, which is laxer.)
#pragma once

template <bool, class T> struct sim_only_if {};
template <class T> struct sim_only_if<true, T> { using type = T; };

struct bfloat {
  unsigned short bits;
  bfloat() = default;
  constexpr explicit bfloat(float f) : bits((unsigned short)(__builtin_bit_cast(unsigned, f) >> 16)) {}
  constexpr explicit bfloat(_Float16 h) : bfloat((float)h) {}
  template <class I, class = typename sim_only_if<__is_integral(I), I>::type> constexpr bfloat(I i) : bfloat((float)i) {}
  constexpr operator float() const { return __builtin_bit_cast(float, (unsigned)bits << 16); }
  constexpr bfloat operator-() const { return bfloat(-(float)*this); }
  constexpr bfloat operator+() const { return *this; }
};
#define SIM_BFLOAT_OP(op, assign)                                                                             \
  constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op(float) b); }                   \
  template <class I> constexpr typename sim_only_if<__is_integral(I), bfloat>::type operator op(bfloat a, I b) { \
    return bfloat((float)a op(float) b);                                                                      \
  }                                                                                                           \
  template <class I> constexpr typename sim_only_if<__is_integral(I), bfloat>::type operator op(I a, bfloat b) { \
    return bfloat((float)a op(float) b);                                                                      \
  }                                                                                                           \
  constexpr bfloat& operator assign(bfloat& a, bfloat b) { return a = a op b; }
SIM_BFLOAT_OP(+, +=) SIM_BFLOAT_OP(-, -=) SIM_BFLOAT_OP(*, *=) SIM_BFLOAT_OP(/, /=)
#undef SIM_BFLOAT_OP
