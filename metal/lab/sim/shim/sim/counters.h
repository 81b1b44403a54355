#pragma once
// Only in builds that measure coverage: what the compiler's tables tell when the library is loaded. One flag in `hit` and one
// entry of `blocks` (address, kind) for every basic block, critical edges split; `edges` lists each block with its successors.
struct SimCoverage {
  const char* base;
  const bool *hit, *hit_end;
  const unsigned long *blocks, *blocks_end, *edges, *edges_end;
};
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));
static SimCoverage sim_counted = {};
#define SIM_UNCOUNTED extern "C" __attribute__((no_sanitize("coverage")))
SIM_UNCOUNTED void __sanitizer_cov_bool_flag_init(bool* first, bool* last) {
  sim_counted.hit = first, sim_counted.hit_end = last;
}
SIM_UNCOUNTED void __sanitizer_cov_pcs_init(const unsigned long* first, const unsigned long* last) {
  sim_counted.blocks = first, sim_counted.blocks_end = last;
}
SIM_UNCOUNTED void __sanitizer_cov_cfs_init(const unsigned long* first, const unsigned long* last) {
  sim_counted.edges = first, sim_counted.edges_end = last;
}
SIM_UNCOUNTED __attribute__((visibility("default"))) const SimCoverage* sim_coverage() {
  sim_counted.base = __ehdr_start;
  return &sim_counted;
}
