// What MLX uses of Metal 4's tensors and of Metal Performance Primitives: `matmul2d` on cooperative tensors.
#pragma once
#include "legal/simdgroups.h"

namespace metal {
struct execution_simdgroup {};
struct execution_thread {};
template <int N> struct execution_simdgroups {};
template <class T, long... E> struct extents {};
template <class I, int R> struct dextents {
  template <class... A> dextents(A...) {}
};
constexpr constant long dynamic_extent = -1;
struct tensor_inline {};
struct tensor_handle {};
template <class T, class Extents, class Storage = tensor_handle> struct tensor {
  template <class... A> tensor(A...) {}
  template <class... A> tensor slice(A...) const;
};
}  // namespace metal

namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
};
// A descriptor is a template argument of class type, which C++17 does not have: here it is a number.
constexpr int __descriptor(int, int, int, bool = false, bool = false, bool = false,
                           matmul2d_descriptor::mode = matmul2d_descriptor::mode::multiply) { return 0; }
#define matmul2d_descriptor(...) __descriptor(__VA_ARGS__)
template <class T> struct cooperative_tensor {
  thread T& operator[](int); const thread T& operator[](int) const;
  int get_capacity() const; bool is_valid_element(int) const;
  template <class S> void load(S); template <class S> void store(S) const;
};
template <int Descriptor, class Scope> struct matmul2d {
  template <class A, class B, class C> cooperative_tensor<A> get_left_input_cooperative_tensor() const;
  template <class A, class B, class C> cooperative_tensor<B> get_right_input_cooperative_tensor() const;
  template <class A, class B, class C> cooperative_tensor<C> get_destination_cooperative_tensor() const;
  template <class A, class B, class C> void run(A, B, C) const;
};
}  // namespace tensor_ops
}  // namespace mpp
