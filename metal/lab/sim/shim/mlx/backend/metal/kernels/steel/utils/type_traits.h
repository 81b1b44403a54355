// The traits that MLX's steel kernels add to Metal's, without the specializations by address space that C++ cannot tell apart.
#pragma once
#include <metal_stdlib>

namespace metal {
template <class T> struct is_static : bool_constant<__is_empty(T)> {};
template <class T> struct pointer_element {};
template <class T> struct pointer_element<T*> { using type = remove_cv_t<T>; };
template <class T> using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
}  // namespace metal
