// N neighbouring words, loaded at once.
template <int N, typename Word>
inline void load_words(const device Word* from, uint first, thread Word* words) {
  if (N == 1) {
    words[0] = from[first];
  } else {
    const vec<Word, N == 1 ? 2 : N> loaded = *(const device vec<Word, N == 1 ? 2 : N>*)(from + first);
    UNROLL
    for (int i = 0; i < N; i++) {
      words[i] = loaded[i];
    }
  }
}
