// Finds out at run time which features the processor and the operating system support, and asks for those that need it.
// Compiled into a separate library that runs on every processor of its architecture; build.py chooses the kernels to
// load by its answer.

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace {

char names[256];

void add(const char* name, bool is_supported) {
  if (!is_supported) return;
  std::strcat(names, name);
  std::strcat(names, " ");
}

#if defined(__x86_64__)

// Asks the operating system to save the tiles of AMX, for all threads of this process.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

void add_all() {
  // These also check that the operating system saves the registers.
  __builtin_cpu_init();
  add("avx2", __builtin_cpu_supports("avx2"));
  add("fma", __builtin_cpu_supports("fma"));
  add("bmi", __builtin_cpu_supports("bmi"));
  add("bmi2", __builtin_cpu_supports("bmi2"));
  add("avx512f", __builtin_cpu_supports("avx512f"));
  add("avx512bw", __builtin_cpu_supports("avx512bw"));
  add("avx512cd", __builtin_cpu_supports("avx512cd"));
  add("avx512dq", __builtin_cpu_supports("avx512dq"));
  add("avx512vl", __builtin_cpu_supports("avx512vl"));
  add("avx512bf16", __builtin_cpu_supports("avx512bf16"));
  // These add no registers that the operating system must save; clang 14's __builtin_cpu_supports does not know their
  // names.
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) {
    add("f16c", c >> 29 & 1);
    add("movbe", c >> 22 & 1);
  }
  if (__get_cpuid(0x80000001, &a, &b, &c, &d)) add("lzcnt", c >> 5 & 1);
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    add("avx512vnni", c >> 11 & 1);
    const bool has_tiles = d >> 24 & 1 && may_use_tiles();
    add("amx_tile", has_tiles);
    add("amx_bf16", has_tiles && d >> 22 & 1);
    add("amx_int8", has_tiles && d >> 25 & 1);
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) add("avxvnni", a >> 4 & 1);
}

#elif defined(__APPLE__)

void add_all() {
  int value = 0;
  size_t size = sizeof value;
  add("neon", true);
  add("bf16", sysctlbyname("hw.optional.arm.FEAT_BF16", &value, &size, nullptr, 0) == 0 && value != 0);
  size = sizeof value;
  add("i8mm", sysctlbyname("hw.optional.arm.FEAT_I8MM", &value, &size, nullptr, 0) == 0 && value != 0);
}

#elif defined(__aarch64__)

void add_all() {
  constexpr unsigned long kBfloat16 = 1ul << 14;  // HWCAP2_BF16, which older headers do not define
  constexpr unsigned long kI8mm = 1ul << 13;      // HWCAP2_I8MM
  add("neon", true);
  add("bf16", getauxval(AT_HWCAP2) & kBfloat16);
  add("i8mm", getauxval(AT_HWCAP2) & kI8mm);
}

#else

void add_all() {}

#endif

}  // namespace

// Names of the supported features, each followed by a space.
extern "C" __attribute__((visibility("default"))) const char* toka_cpu_features() {
  names[0] = 0;
  add_all();
  return names;
}
