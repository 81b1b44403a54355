// What kernel text and the runtime agree on. Plain C, so that both sides see the same layout.
#pragma once

enum { SIM_LANES = 32, SIM_SLOT = 32, SIM_PATH = 62 };

struct SimThread {
  unsigned position_in_grid[3];
  unsigned position_in_threadgroup[3];
  unsigned group_position_in_grid[3];
  unsigned threads_per_grid[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_threadgroup[3];           // of this group: smaller at the edge of the grid
  unsigned dispatch_threads_per_threadgroup[3];  // as launched
  unsigned index_in_threadgroup;
  unsigned lane;
  unsigned simdgroup;
  unsigned simdgroups;
  unsigned dispatch_simdgroups;
  // The way to where the thread is, from the outside: a call is its place in the text, a loop its place and the number of the iteration.
  unsigned path_length;
  unsigned at_end;  // 1 once it has come to the kernel's last line, and not to a return before it
  unsigned long path[SIM_PATH];
};

// What the lanes of a simdgroup gave to one operation. Lane i's operand is slots[i] if bit i of active is set.
struct SimExchange {
  unsigned active;
  unsigned done;  // 1 once `result` holds the value that all lanes share
  unsigned char result[SIM_SLOT] __attribute__((aligned(16)));
  unsigned char slots[SIM_LANES][SIM_SLOT] __attribute__((aligned(16)));
};

// A declaration of threadgroup memory. The linker puts those of a library side by side; the runtime gives each its place.
struct SimArray {
  void* base;
  unsigned long bytes, align;
  const char *name, *function;
} __attribute__((aligned(64)));
#ifdef SIM_MACH_O
#define SIM_ARRAY_TABLE __attribute__((used, section("__DATA,sim_arrays")))
#else
#define SIM_ARRAY_TABLE __attribute__((used, section("sim_arrays")))
#endif

enum SimOp {
  SIM_OP_REDUCE, SIM_OP_PREFIX, SIM_OP_SHUFFLE_INDEXED, SIM_OP_SHUFFLE_UNIFORM, SIM_OP_SHUFFLE_XOR, SIM_OP_SHUFFLE_SHIFT,
  SIM_OP_BROADCAST, SIM_OP_BROADCAST_FIRST, SIM_OP_VOTE, SIM_OP_ACTIVE, SIM_OP_MATRIX_MULTIPLY, SIM_OP_MATRIX_LOAD,
  SIM_OP_MATRIX_STORE, SIM_OP_KINDS
};
enum SimAtomic { SIM_ATOMIC_LOAD = 1, SIM_ATOMIC_STORE = 2, SIM_ATOMIC_UPDATE = 3 };
enum SimScope { SIM_SCOPE_SIMDGROUP, SIM_SCOPE_QUAD };
enum SimFault {
  SIM_FAULT_OUT_OF_BOUNDS = 1, SIM_FAULT_WRITE_TO_INPUT, SIM_FAULT_UNINITIALISED, SIM_FAULT_RACE,
  SIM_FAULT_BARRIER_DIVERGENCE, SIM_FAULT_INACTIVE_LANE, SIM_FAULT_THREADGROUP_MEMORY, SIM_FAULT_MISALIGNED,
  SIM_FAULT_STACK_OVERFLOW, SIM_FAULT_UNWRITTEN, SIM_FAULT_CRASH, SIM_FAULT_ARITHMETIC,
  SIM_FAULT_TRUNCATION = 14, SIM_FAULT_ENDLESS, SIM_FAULT_DIVERGENT, SIM_FAULT_NOT_UNIFORM, SIM_NOTE_DIVERGENT
};

// Functions of metal::fast:: with errors of their own.
#define SIM_FAST_FUNCTIONS(X)                                                                                  \
  X(acos) X(asin) X(atan) X(cos) X(cospi) X(exp) X(exp2) X(exp10) X(log) X(log2) X(log10) X(rsqrt) X(sin)      \
  X(sinpi) X(sqrt)
#define SIM_NUMBER(name) SIM_FAST_##name,
enum SimFast { SIM_FAST_FUNCTIONS(SIM_NUMBER) SIM_FAST_KINDS };
#undef SIM_NUMBER

// Two calls in two branches are two operations, whatever they have in common.
#define SIM_MEETS __attribute__((convergent, nomerge))

extern "C" {
// The same for as long as a thread lives: it never leaves its stack.
const struct SimThread* sim_thread(void) __attribute__((const));
// Waits until every active lane has brought its operand; the answer lives until the lane's next operation.
// `argument` is the lane, mask or delta of the operation, `place` where the text calls it.
const struct SimExchange* sim_exchange(const void* value, unsigned size, unsigned op, unsigned scope, unsigned argument,
                                       unsigned long place) SIM_MEETS;
void sim_barrier(unsigned flags, unsigned long place) SIM_MEETS;
void sim_simdgroup_barrier(unsigned flags, unsigned long place) SIM_MEETS;
void sim_atomic_access(const void* address, unsigned size, unsigned access);
void sim_inactive_lane(unsigned lane);
void sim_assertion(const char* text);
float sim_fast(unsigned function, float exact, float x) __attribute__((const));
float sim_fast_divide(float x, float y) __attribute__((const));
}
