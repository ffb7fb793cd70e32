// Threads that share a loop. Who is there takes the next items, and the caller leaves when what was taken is done: it does
// not wait for a thread that comes late, because another process has its core, and would find nothing left to do. An
// OpenMP region waits for each of its threads: with one other busy process on two cores, a step of one sequence took three
// times as long as on one thread.
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

  // Threads that share a loop, the caller among them.
  static int size() { return num_threads_; }

  static void set_size(int num_threads) { num_threads_ = num_threads; }

  // Runs body(thread) in the caller, thread 0, and, meanwhile, in those of num_threads - 1 others that are there; ends when
  // all have returned. The bodies share out the work: a body that starts late finds none. One caller at a time.
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
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    body(0);
    is_open_ = false;
    for (int spins = 0; num_inside_ > 0; ++spins) relax(spins);
  }

  // body(item) for each item of [0, num_items), `chunk` of them at a time.
  template <typename Body>
  void share(int64_t num_items, int64_t chunk, const Body& body) {
    std::atomic<int64_t> num_taken{0};
    run(num_items <= chunk ? 1 : size(), [&](int) {
      for (;;) {
        const int64_t first = num_taken.fetch_add(chunk), end = std::min(first + chunk, num_items);
        if (first >= num_items) return;
        for (int64_t item = first; item < end; ++item) body(item);
      }
    });
  }

  // body(item) for each item of [0, num_items), where a thread asks for the memory of the next item meanwhile: each thread
  // begins with a range of its own, and then takes items from the ranges of others.
  template <typename Body>
  void share_ranges(int64_t num_items, const Body& body) {
    struct alignas(64) Range {
      std::atomic<int64_t> next;
      int64_t end;
    };
    constexpr int kMostRanges = 64;
    Range ranges[kMostRanges];
    const int num_threads = num_items == 1 ? 1 : size(), num_ranges = std::min(num_threads, kMostRanges);
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

  // Before a thread sleeps: some 20 microseconds, which cover the caller's way from one loop to the next.
  static constexpr int kSpins = 2000;

  static void relax(int spins) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    asm volatile("isb");  // as long; a yield is over at once
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
      // Who is inside is waited for; who comes when it is closed does not look at the body, which may be gone.
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
