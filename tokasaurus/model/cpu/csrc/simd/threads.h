// A team of threads that divides the work items of a loop. All kernels use this team and no other threads.
//
// Each running thread claims the next items, and the caller returns when all claimed items are done. It does not wait
// for a thread that starts late because another process occupies its core: that thread would find no items left. An
// OpenMP region waits for each of its threads: with one other busy process on two cores, a step of one sequence took
// three times as long as on one thread.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

class Team {
 public:
  // The process's team. It is never destroyed: its threads end with the process.
  static Team& get() {
    static Team* team = new Team;
    return *team;
  }

  // Number of threads, including the caller.
  static int size() { return num_threads_; }

  static void set_size(int num_threads) { num_threads_ = num_threads; }

  // Runs body(thread) in the caller, which is thread 0, and at the same time in those of the num_threads - 1 helpers
  // that are available. Returns when every body that was started has returned. The bodies must divide the work among
  // themselves, and a body that starts late must find none left. One caller at a time.
  template <typename Body>
  void run(int num_threads, const Body& body) {
    if (num_threads == 1) return body(0);
    for (; num_helpers_ < num_threads - 1; ++num_helpers_) std::thread(&Team::help, this, num_helpers_).detach();
    body_ = &body;
    call_ = [](const void* body, int thread) { (*(const Body*)body)(thread); };
    num_wanted_ = num_threads - 1;
    is_open_ = true;
    ++generation_;
    if (num_asleep_ > 0) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
      }
      wake_.notify_all();
    }
    body(0);
    is_open_ = false;
    for (int spins = 0; num_inside_ > 0; ++spins) relax(spins);
  }

  // Calls body(item) for each item of [0, num_items); threads claim `chunk` items at a time.
  template <typename Body>
  void parallel_for(int64_t num_items, int64_t chunk, const Body& body) {
    std::atomic<int64_t> num_claimed{0};
    run(num_items <= chunk ? 1 : size(), [&](int) {
      for (;;) {
        const int64_t first = num_claimed.fetch_add(chunk), end = std::min(first + chunk, num_items);
        if (first >= num_items) return;
        for (int64_t item = first; item < end; ++item) body(item);
      }
    });
  }

  // Calls body(item) for each item of [0, num_items). For bodies that prefetch the next item's memory: each thread
  // computes one range of consecutive items, and then claims items from the other threads' ranges.
  template <typename Body>
  void parallel_for_ranges(int64_t num_items, const Body& body) {
    struct alignas(64) Range {
      std::atomic<int64_t> next;
      int64_t end;
    };
    constexpr int kMaxRanges = 64;
    Range ranges[kMaxRanges];
    const int num_threads = num_items == 1 ? 1 : size(), num_ranges = std::min(num_threads, kMaxRanges);
    for (int i = 0; i < num_ranges; ++i) {
      ranges[i].next = num_items * i / num_ranges;
      ranges[i].end = num_items * (i + 1) / num_ranges;
    }
    run(num_threads, [&](int thread) {
      for (int i = 0; i < num_ranges; ++i) {
        Range& range = ranges[(thread + i) % num_ranges];
        for (int64_t item; (item = range.next++) < range.end;) body(item);
      }
    });
  }

 private:
  static inline int num_threads_ = 1;

  // Spins before a thread sleeps: about 20 microseconds, longer than the caller takes from one loop to the next.
  static constexpr int kSpins = 2000;

  static void relax(int spins) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    asm volatile("isb");  // takes as long as x86's pause; "yield" ends at once
#endif
    if (spins > kSpins) sched_yield();
  }

  void help(int index) {
    for (uint64_t seen = 0;;) {
      for (int spins = 0; generation_ == seen && spins < kSpins; ++spins) relax(spins);
      if (generation_ == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        ++num_asleep_;
        wake_.wait(lock, [&] { return generation_ != seen; });
        --num_asleep_;
      }
      seen = generation_;
      // `run` waits while num_inside_ > 0. A thread that enters after `run` has cleared is_open_ must not use the body,
      // which may no longer exist.
      ++num_inside_;
      if (is_open_ && index < num_wanted_) call_(body_, index + 1);
      --num_inside_;
    }
  }

  const void* body_ = nullptr;
  void (*call_)(const void*, int) = nullptr;
  int num_wanted_ = 0, num_helpers_ = 0;
  alignas(64) std::atomic<uint64_t> generation_{0};
  std::atomic<bool> is_open_{false};
  std::atomic<int> num_asleep_{0};
  alignas(64) std::atomic<int> num_inside_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};
