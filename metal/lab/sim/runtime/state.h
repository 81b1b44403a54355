// The state of one launch. One kernel library runs one launch at a time, on one operating system thread.
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include "../shim/sim/abi.h"
#include "fiber.h"

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxGroups = kMaxThreads / SIM_LANES;
constexpr unsigned kMaxBuffers = 128;
constexpr unsigned kMaxFindings = 64;
constexpr unsigned kMaxArrays = 256;
constexpr unsigned kPermutations = 32;
constexpr int kNone = -1;

// ---- shared with launch.py ---------------------------------------------------------------------------
struct BufferCounters {
  uint64_t reads, writes, bytes_read, bytes_written;
  uint64_t distinct_read, distinct_written;              // bytes, in the whole launch
  uint64_t group_distinct_read, group_distinct_written;  // bytes, distinct within a threadgroup, summed over threadgroups
  uint64_t simd_accesses, simd_segments, simd_ideal_segments;  // accesses by up to 32 lanes at once; 128-byte lines they took
  uint64_t unwritten_elements, first_unwritten;
};
struct Buffer {
  uint8_t* base;
  uint64_t bytes;
  uint32_t item_bytes;
  uint32_t writable;
  uint32_t tracked;  // 0: filled by the host before the launch, so it holds no uninitialised element
  uint32_t reserved;
  uint64_t start;  // where in it the pointer lies that the kernel is given
  BufferCounters counters;
};
struct Finding {
  uint32_t kind, is_write;
  int32_t buffer;       // index, or -1
  int32_t array;        // threadgroup array, or -1
  int64_t offset;       // bytes from the start of the buffer or array
  uint32_t size, count;
  uint32_t group[3], thread[3];
  uint32_t other_group[3], other_thread[3];
  uint64_t pc;          // address within the library
  uint32_t other_state; // for a barrier: 0 waits elsewhere, 1 returned. For a race: 1 if the other access was a write
  uint32_t line;        // where the compiler knew it
  char text[96];
};
struct ArrayInfo { uint64_t bytes; char name[56]; };
struct Launch {
  uint32_t grid[3], threadgroup[3];
  uint64_t seed;
  double patience;  // seconds of processor time in which some thread must come to its end
  uint32_t checked, coalescing;
  uint32_t buffer_count, stack_bytes;
  uint32_t fast_errors;  // metal::fast:: errs as it may (fast_math.cpp)
  uint8_t* stacks;  // kMaxThreads stacks of stack_bytes each
  uint8_t* arena;   // address space for threadgroup arrays
  Buffer* buffers;
  // filled in
  uint32_t finding_count, aborted;
  uint64_t threadgroup_bytes;  // threadgroup memory of one threadgroup
  uint32_t array_count, reserved;
  uint64_t threadgroups, threads, barriers, divergent_ops;
  uint64_t benign_races;  // unordered writes of the value that was there
  Finding findings[kMaxFindings];
  ArrayInfo arrays[kMaxArrays];
};

// ---- one GPU thread ----------------------------------------------------------------------------------
enum FiberState : uint8_t { kReady, kAtExchange, kAtSimdBarrier, kAtBarrier, kDone };
struct Fiber {
  SimThread thread;
  void* sp;
  uintptr_t stack_low, stack_high;
  uintptr_t site, depth;  // where it waits: return address, and how deep in calls
  uint64_t place;         // the same in the kernel's text (shim/sim/paths.h)
  uint32_t flags, op, scope, argument;
  FiberState state;
};
struct Simdgroup {
  uint32_t first, count;  // fibers [first, first + count)
  uint32_t ready;         // mask of lanes that can run
  uint32_t at_exchange, at_barrier;  // masks of lanes that wait for the simdgroup
  uint32_t returned, ended;          // masks of lanes that are done: by a return before the kernel's last line, or there
  bool mixed;                        // they do not all wait at the same instance of an operation
  const Fiber* waits_first;
  uint32_t permutation, at;
  uint32_t parity;
  uint32_t epoch_threadgroup, epoch_device;  // grow with simdgroup_barrier, by what it orders
  SimExchange exchange[2];
};
struct State {
  Launch* launch;
  Fiber* current;
  Simdgroup* simd;
  void* main_sp;
  uint64_t random;
  uint32_t group[3], group_linear;
  uint64_t first_group, group_step, group_total;
  uint32_t thread_count, simd_count;
  uint32_t epoch_threadgroup, epoch_device;  // grow with threadgroup_barrier, by what it orders
  bool abort;
  volatile bool overdue;             // the watchdog asks the next hook to end the launch
  volatile uint64_t threads_ended;
  uint8_t permutations[kPermutations][SIM_LANES];
  Fiber fibers[kMaxThreads];
  Simdgroup simds[kMaxGroups];
};
extern State S;

static inline uint64_t next_random() {
  S.random += 0x9e3779b97f4a7c15ull;
  uint64_t z = S.random;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// scheduler.cpp
[[noreturn]] void abandon_launch();
// crash.cpp
void crash_guard_begin();
void crash_guard_end();
sigjmp_buf* crash_landing();
// watchdog.cpp
void watchdog_begin();
void watchdog_end();
[[noreturn]] void give_up_waiting(uintptr_t pc);
// findings.cpp
Finding* add_finding(uint32_t kind, uintptr_t pc, int buffer, int array, int64_t offset, uint32_t size, bool is_write);
uintptr_t library_begin();
uintptr_t library_bytes();
void set_other(Finding* finding, uint32_t group_linear, uint32_t thread_linear);
// memory.cpp
void memory_begin_launch();
void memory_begin_group();
void memory_end_group();
void memory_end_launch();
void memory_access(uintptr_t address, uint32_t size, bool is_write, bool atomic, uintptr_t pc);
void memory_settle();  // the running thread stops: judge its last store
// coalescing.cpp
void coalescing_access(int buffer, uintptr_t address, uint32_t size, uintptr_t pc);
void coalescing_flush(Simdgroup* simd);
void coalescing_begin();

extern "C" void sim_kernel_entry(void* const* buffers);
