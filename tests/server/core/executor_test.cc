#include "server/device/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/errors.h"
#include "server/metrics/metrics.h"

namespace spmmd::server {
namespace {

// A job that records how it ended.
struct Recorded {
  explicit Recorded(uint64_t bytes = 1) : job(std::make_shared<Job>()) {
    job->bytes = bytes;
    job->done = [state = state](absl::Status status) {
      state->status = std::move(status);
      state->ends.fetch_add(1);
      state->ended.Notify();
    };
  }
  absl::Status Wait() {
    state->ended.WaitForNotification();
    return state->status;
  }

  struct State {
    absl::Status status;
    std::atomic<int> ends{0};
    absl::Notification ended;
  };
  std::shared_ptr<State> state = std::make_shared<State>();
  std::shared_ptr<Job> job;
};

// Runs the jobs of a batch one after the other.
Executor::Run Each(std::function<absl::Status(Job&)> run) {
  return [run = std::move(run)](absl::Span<Job* const> jobs) {
    for (Job* job : jobs) {
      if (absl::Status status = run(*job); !status.ok()) return status;
    }
    return absl::OkStatus();
  };
}

// An executor whose first job runs, on a thread of its own, until Release().
class ExecutorTest : public ::testing::Test {
 protected:
  void StartBusy(Executor::Options options) {
    executor_ = std::make_unique<Executor>(options, Each([this](Job& job) {
                                             launches_.fetch_add(1);
                                             if (&job == first_.job.get()) {
                                               running_.Notify();
                                               release_.WaitForNotification();
                                             }
                                             return absl::OkStatus();
                                           }),
                                           &metrics_);
    submitter_ = std::thread([this] { executor_->Submit(first_.job); });
    running_.WaitForNotification();
  }
  void Release() {
    if (!release_.HasBeenNotified()) release_.Notify();
    if (submitter_.joinable()) submitter_.join();
  }
  void TearDown() override { Release(); }

  Metrics metrics_;
  Recorded first_;
  std::atomic<int> launches_{0};
  absl::Notification running_;
  absl::Notification release_;
  std::thread submitter_;
  std::unique_ptr<Executor> executor_;
};

TEST_F(ExecutorTest, IdleDeviceRunsOnTheSubmittingThread) {
  std::thread::id ran_on;
  Executor executor({}, Each([&](Job&) {
                      ran_on = std::this_thread::get_id();
                      return absl::OkStatus();
                    }),
                    &metrics_);
  Recorded job;
  executor.Submit(job.job);
  EXPECT_EQ(job.state->ends, 1);  // already
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_TRUE(job.state->status.ok());
}

// Submits jobs until a thread is awake for the next one, and gives it `task`.
void OfferSoon(Executor& executor, std::function<void()> task) {
  absl::AnyInvocable<void()> offered = std::move(task);
  while (!executor.Offer(offered)) {
    Recorded job;
    executor.Submit(job.job);
    EXPECT_TRUE(job.Wait().ok());
    std::this_thread::yield();
  }
  EXPECT_TRUE(offered == nullptr);
}

TEST_F(ExecutorTest, AnAwakeThreadTakesTheWholeWay) {
  Executor::Options options;
  options.look = absl::Seconds(30);
  std::thread::id ran_on;
  Executor executor(options, Each([&](Job&) {
                      ran_on = std::this_thread::get_id();
                      return absl::OkStatus();
                    }),
                    &metrics_);
  for (int i = 0; i < 100; ++i) {
    Recorded job;
    absl::Notification ended;
    std::thread::id offered_to;
    OfferSoon(executor, [&] {
      offered_to = std::this_thread::get_id();
      executor.Submit(job.job);
      EXPECT_EQ(job.state->ends, 1);  // run by this very thread
      EXPECT_EQ(ran_on, offered_to);
      ended.Notify();
    });
    ended.WaitForNotification();
    EXPECT_NE(offered_to, std::this_thread::get_id());
  }
  // Jobs submitted while it is awake are its own too.
  absl::Notification ended;
  OfferSoon(executor, [&] { ended.Notify(); });
  ended.WaitForNotification();
  for (int i = 0; i < 100; ++i) {
    Recorded job;
    executor.Submit(job.job);
    EXPECT_TRUE(job.Wait().ok());
  }
}

TEST_F(ExecutorTest, JobsOfAThreadThatIsAwakeStay) {
  Executor::Options options;
  options.look = absl::Seconds(30);
  std::thread::id ran_on;
  Executor executor(options, Each([&](Job&) {
                      ran_on = std::this_thread::get_id();
                      return absl::OkStatus();
                    }),
                    &metrics_);
  absl::Notification ended;
  OfferSoon(executor, [&] { ended.Notify(); });
  ended.WaitForNotification();
  for (int i = 0; i < 100; ++i) {
    Recorded job;
    job.job->stay = true;
    executor.Submit(job.job);
    EXPECT_EQ(job.state->ends, 1);
    EXPECT_EQ(ran_on, std::this_thread::get_id());
  }
}

TEST_F(ExecutorTest, NobodyIsAwakeForLong) {
  Executor plain({}, Each([](Job&) { return absl::OkStatus(); }), &metrics_);
  absl::AnyInvocable<void()> task = [] { FAIL(); };
  for (int i = 0; i < 10; ++i) {
    Recorded job;
    plain.Submit(job.job);
    EXPECT_FALSE(plain.Offer(task));
  }
  EXPECT_TRUE(task != nullptr);
  Executor::Options options;
  options.look = absl::Milliseconds(2);
  Executor executor(options, Each([](Job&) { return absl::OkStatus(); }), &metrics_);
  absl::Notification ended;
  OfferSoon(executor, [&] { ended.Notify(); });
  ended.WaitForNotification();
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_FALSE(executor.Offer(task));
  // What comes then is run as ever.
  Recorded job;
  executor.Submit(job.job);
  EXPECT_TRUE(job.Wait().ok());
}

TEST_F(ExecutorTest, AwakeOrNotEveryJobEndsOnce) {
  Executor::Options options;
  options.look = absl::Microseconds(200);
  Executor executor(options, Each([](Job&) { return absl::OkStatus(); }), &metrics_);
  std::atomic<int> offered{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        Recorded job;
        absl::AnyInvocable<void()> task = [&executor, &job] { executor.Submit(job.job); };
        if (executor.Offer(task)) {
          offered.fetch_add(1);
        } else {
          executor.Submit(job.job);
        }
        EXPECT_TRUE(job.Wait().ok());
        EXPECT_EQ(job.state->ends, 1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  executor.Drain();
  EXPECT_EQ(executor.depth(), 0);
  // The end comes while a thread is awake, and with a task on its way.
  Recorded last;
  OfferSoon(executor, [&] { executor.Submit(last.job); });
  executor.Stop();
  last.Wait().IgnoreError();
  absl::AnyInvocable<void()> task = [] { FAIL(); };
  EXPECT_FALSE(executor.Offer(task));
}

TEST_F(ExecutorTest, DrainWaitsForATask) {
  Executor::Options options;
  options.look = absl::Seconds(30);
  Executor executor(options, Each([](Job&) { return absl::OkStatus(); }), &metrics_);
  for (int i = 0; i < 20; ++i) {
    std::atomic<bool> ended{false};
    OfferSoon(executor, [&] {
      absl::SleepFor(absl::Milliseconds(5));
      ended = true;
    });
    executor.Drain();
    ASSERT_TRUE(ended);
  }
}

// A job may come when the thread that is awake has been given a task and has not seen it yet.
TEST_F(ExecutorTest, ATaskHoldsUpNoJob) {
  Executor::Options options;
  options.look = absl::Seconds(30);
  Executor executor(options, Each([](Job&) { return absl::OkStatus(); }), &metrics_);
  for (int i = 0; i < 2000; ++i) {
    Recorded job;
    bool in_time = false;
    absl::Notification ended;
    OfferSoon(executor, [&] {
      in_time = job.state->ended.WaitForNotificationWithTimeout(absl::Seconds(10));
      ended.Notify();
    });
    executor.Submit(job.job);
    ended.WaitForNotification();
    ASSERT_TRUE(in_time) << "round " << i;
  }
}

TEST_F(ExecutorTest, WithoutInlineItRunsOnTheExecutorsThread) {
  std::thread::id ran_on;
  Executor::Options options;
  options.run_inline = false;
  Executor executor(options, Each([&](Job&) {
                      ran_on = std::this_thread::get_id();
                      return absl::OkStatus();
                    }),
                    &metrics_);
  Recorded job;
  executor.Submit(job.job);
  EXPECT_TRUE(job.Wait().ok());
  EXPECT_NE(ran_on, std::this_thread::get_id());
}

TEST_F(ExecutorTest, WaitingJobsRunInOrderOneAtATime) {
  std::vector<int> order;
  std::atomic<int> at_once{0};
  absl::Notification go;
  std::atomic<int> next{0};
  Executor executor({}, Each([&](Job& job) {
                      EXPECT_EQ(at_once.fetch_add(1), 0);
                      if (next.fetch_add(1) == 0) go.WaitForNotification();
                      order.push_back(static_cast<int>(job.bytes));
                      at_once.fetch_sub(1);
                      return absl::OkStatus();
                    }),
                    &metrics_);
  std::vector<Recorded> jobs;
  for (int i = 0; i < 20; ++i) jobs.emplace_back(static_cast<uint64_t>(i));
  std::thread first([&] { executor.Submit(jobs[0].job); });
  while (next.load() == 0) std::this_thread::yield();
  for (int i = 1; i < 20; ++i) executor.Submit(jobs[static_cast<size_t>(i)].job);
  EXPECT_EQ(executor.depth(), 19);
  go.Notify();
  executor.Drain();
  first.join();
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(order[static_cast<size_t>(i)], i);
    EXPECT_EQ(jobs[static_cast<size_t>(i)].state->ends, 1);
  }
  EXPECT_EQ(executor.depth(), 0);
  EXPECT_EQ(executor.bytes(), 0u);
}

TEST_F(ExecutorTest, FullQueueRefusesAtOnceWithRetryInfo) {
  Executor::Options options;
  options.max_depth = 2;
  StartBusy(options);
  Recorded a;
  Recorded b;
  executor_->Submit(a.job);
  executor_->Submit(b.job);
  for (int i = 0; i < 136; ++i) {
    Recorded refused;
    executor_->Submit(refused.job);
    ASSERT_EQ(refused.state->ends, 1);
    EXPECT_EQ(refused.state->status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(ReasonOf(refused.state->status), "QUEUE_FULL");
    EXPECT_GT(RetryDelayOf(refused.state->status).value_or(absl::ZeroDuration()), absl::ZeroDuration());
  }
  EXPECT_EQ(executor_->depth(), 2);
  Release();
  EXPECT_TRUE(a.Wait().ok());
  EXPECT_TRUE(b.Wait().ok());
  executor_->Drain();
  EXPECT_EQ(executor_->depth(), 0);
  EXPECT_EQ(launches_, 3);
}

TEST_F(ExecutorTest, QueueIsBoundedInBytesToo) {
  Executor::Options options;
  options.max_bytes = 1000;
  StartBusy(options);
  Recorded a(600);
  executor_->Submit(a.job);
  Recorded b(401);
  executor_->Submit(b.job);
  EXPECT_EQ(ReasonOf(b.Wait()), "QUEUE_BYTES");
  EXPECT_TRUE(RetryDelayOf(b.Wait()).has_value());
  Recorded c(400);
  executor_->Submit(c.job);
  EXPECT_EQ(executor_->bytes(), 1000u);
  Release();
  EXPECT_TRUE(a.Wait().ok());
  EXPECT_TRUE(c.Wait().ok());
  executor_->Drain();
  EXPECT_EQ(executor_->bytes(), 0u);
}

TEST_F(ExecutorTest, ExpiredJobsInTheQueueAreNotLaunched) {
  StartBusy({});
  std::vector<Recorded> jobs(100);
  for (Recorded& recorded : jobs) {
    recorded.job->deadline = absl::Now() + absl::Milliseconds(1);
    executor_->Submit(recorded.job);
  }
  absl::SleepFor(absl::Milliseconds(5));
  Release();
  executor_->Drain();
  for (Recorded& recorded : jobs) EXPECT_EQ(recorded.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(launches_, 1);
}

TEST_F(ExecutorTest, ExpiredOnArrivalIsNotLaunched) {
  Executor executor({}, Each([&](Job&) {
                      launches_.fetch_add(1);
                      return absl::OkStatus();
                    }),
                    &metrics_);
  Recorded late;
  late.job->deadline = absl::Now() - absl::Seconds(1);
  executor.Submit(late.job);
  EXPECT_EQ(late.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(launches_, 0);
}

TEST_F(ExecutorTest, CancelTakesAWaitingJobOutAtOnce) {
  StartBusy({});
  Recorded waiting(7);
  executor_->Submit(waiting.job);
  EXPECT_EQ(executor_->bytes(), 7u);
  executor_->Cancel(waiting.job, absl::CancelledError("no longer wanted"));
  // The device is still busy.
  EXPECT_EQ(waiting.state->ends, 1);
  EXPECT_EQ(waiting.state->status, absl::CancelledError("no longer wanted"));
  EXPECT_EQ(executor_->depth(), 0);
  EXPECT_EQ(executor_->bytes(), 0u);
  executor_->Cancel(waiting.job, absl::CancelledError(""));  // no effect
  EXPECT_EQ(waiting.state->ends, 1);
  Release();
  executor_->Drain();
  EXPECT_EQ(launches_, 1);
}

TEST_F(ExecutorTest, StopEndsWaitingJobsAsUnavailableAndLetsTheRunningOneFinish) {
  StartBusy({});
  Recorded waiting;
  executor_->Submit(waiting.job);
  std::thread stopper([&] { executor_->Stop(); });
  EXPECT_EQ(waiting.Wait().code(), absl::StatusCode::kUnavailable);
  Release();
  stopper.join();
  EXPECT_TRUE(first_.Wait().ok());
  Recorded after;
  executor_->Submit(after.job);
  EXPECT_EQ(after.Wait().code(), absl::StatusCode::kUnavailable);
  executor_->Stop();  // idempotent
}

// Submissions, cancellations, expiries and refusals from many threads: every job ends exactly once and nothing is left.
TEST_F(ExecutorTest, EveryJobEndsExactlyOnceUnderChurn) {
  Executor::Options options;
  options.max_depth = 8;
  Executor executor(options,
                    Each([](Job& job) { return job.bytes % 5 == 0 ? absl::InternalError("fails") : absl::OkStatus(); }),
                    &metrics_);
  constexpr int kThreads = 4;
  constexpr int kJobs = 2000;
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      std::vector<Recorded> jobs;
      for (int i = 0; i < kJobs; ++i) {
        Recorded recorded(random() % 100);
        if (random() % 4 == 0) recorded.job->deadline = absl::Now() + absl::Microseconds(random() % 20);
        executor.Submit(recorded.job);
        if (random() % 3 == 0) executor.Cancel(recorded.job, absl::CancelledError(""));
        jobs.push_back(std::move(recorded));
      }
      for (Recorded& recorded : jobs) {
        recorded.state->ended.WaitForNotification();
        ended.fetch_add(recorded.state->ends);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  executor.Drain();
  EXPECT_EQ(ended, kThreads * kJobs);
  EXPECT_EQ(executor.depth(), 0);
  EXPECT_EQ(executor.bytes(), 0u);
}

// An executor that writes down what it ran, and runs nothing before Go().
class BatchTest : public ::testing::Test {
 protected:
  struct Submitted {
    std::string name;
    Recorded job;
  };

  void Start(Executor::Options options) {
    executor_ = std::make_unique<Executor>(
        options,
        [this](absl::Span<Job* const> jobs) {
          std::vector<std::string> names;
          for (Job* job : jobs) names.push_back(names_.at(job));
          {
            absl::MutexLock lock(&mutex_);
            batches_.push_back(absl::StrJoin(names, "+"));
          }
          if (names.front() == "first") {
            running_.Notify();
            go_.WaitForNotification();
          }
          return result_ ? result_(jobs) : absl::OkStatus();
        },
        &metrics_);
  }
  // A job that occupies the device until Go().
  void Occupy() {
    Add("first", 1, nullptr, /*joinable=*/false);
    submitter_ = std::thread([this] { executor_->Submit(jobs_.front()->job.job); });
    running_.WaitForNotification();
  }
  Recorded& Add(const std::string& name, int64_t rows, const void* flow, bool joinable = true,
                bool background = false) {
    jobs_.push_back(std::make_unique<Submitted>());
    Recorded& added = jobs_.back()->job;
    added.job->rows = rows;
    added.job->flow = flow;
    added.job->joinable = joinable;
    added.job->background = background;
    names_[added.job.get()] = name;
    return added;
  }
  Recorded& Submit(const std::string& name, int64_t rows, const void* flow, bool joinable = true,
                   bool background = false) {
    Recorded& added = Add(name, rows, flow, joinable, background);
    executor_->Submit(added.job);
    return added;
  }
  std::vector<std::string> Finish() {
    go_.Notify();
    submitter_.join();
    executor_->Drain();
    return batches_;
  }

  Metrics metrics_;
  std::vector<std::unique_ptr<Submitted>> jobs_;
  std::map<Job*, std::string> names_;
  std::function<absl::Status(absl::Span<Job* const>)> result_;
  absl::Mutex mutex_;
  std::vector<std::string> batches_;
  absl::Notification running_;
  absl::Notification go_;
  std::thread submitter_;
  const int flow_a_ = 0;
  const int flow_b_ = 0;
  std::unique_ptr<Executor> executor_;  // last: its threads use the rest
};

using ::testing::ElementsAre;

TEST_F(BatchTest, FormsWhileTheDeviceIsBusyUpToTheLimit) {
  Executor::Options options;
  options.max_batch_tokens = 4;
  Start(options);
  Occupy();
  Submit("a", 1, &flow_a_);
  Submit("b", 2, &flow_a_);
  Submit("c", 2, &flow_a_);  // would be five
  Submit("d", 1, &flow_a_);  // fits behind b
  Submit("alone", 1, &flow_a_, /*joinable=*/false);
  Submit("e", 1, &flow_a_);
  EXPECT_THAT(Finish(), ElementsAre("first", "a+b+d", "c+e", "alone"));
  for (const auto& submitted : jobs_) EXPECT_TRUE(submitted->job.Wait().ok());
}

TEST_F(BatchTest, FlowsTakeTurns) {
  Executor::Options options;
  options.max_batch_tokens = 2;
  Start(options);
  Occupy();
  for (const char* name : {"a1", "a2", "a3", "a4", "a5", "a6"}) Submit(name, 1, &flow_a_);
  for (const char* name : {"b1", "b2"}) Submit(name, 1, &flow_b_);
  EXPECT_THAT(Finish(), ElementsAre("first", "a1+a2", "b1+b2", "a3+a4", "a5+a6"));
}

TEST_F(BatchTest, BackgroundJobsRunLastButRun) {
  Start({});
  Occupy();
  Submit("background", 1, &flow_a_, false, /*background=*/true);
  std::vector<std::string> expected = {"first"};
  for (int i = 0; i < Executor::kForegroundTurns + 2; ++i) {
    Submit(absl::StrCat("f", i), 1, &flow_b_, false);
    if (i == Executor::kForegroundTurns) expected.push_back("background");
    expected.push_back(absl::StrCat("f", i));
  }
  EXPECT_EQ(Finish(), expected);
}

TEST_F(BatchTest, JobsOfAFailedBatchRunAlone) {
  result_ = [this](absl::Span<Job* const> jobs) {
    for (Job* job : jobs) {
      if (names_.at(job) == "bad") return absl::ResourceExhaustedError("too much");
    }
    return absl::OkStatus();
  };
  Start({});
  Occupy();
  Recorded& good = Submit("good", 1, &flow_a_);
  Recorded& bad = Submit("bad", 1, &flow_a_);
  EXPECT_THAT(Finish(), ElementsAre("first", "good+bad", "good", "bad"));
  EXPECT_TRUE(good.Wait().ok());
  EXPECT_EQ(bad.Wait().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(BatchTest, CancelledAndExpiredJobsLeaveTheirBatch) {
  Start({});
  Occupy();
  Recorded& kept = Submit("kept", 1, &flow_a_);
  Recorded& cancelled = Submit("cancelled", 1, &flow_a_);
  Recorded& expired = Add("expired", 1, &flow_a_);
  expired.job->deadline = absl::Now() + absl::Milliseconds(20);
  executor_->Submit(expired.job);
  executor_->Cancel(cancelled.job, absl::CancelledError());
  EXPECT_EQ(cancelled.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(executor_->depth(), 2);
  absl::SleepFor(absl::Milliseconds(25));
  EXPECT_THAT(Finish(), ElementsAre("first", "kept"));
  EXPECT_TRUE(kept.Wait().ok());
  EXPECT_EQ(expired.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(executor_->depth(), 0);
  EXPECT_EQ(executor_->bytes(), 0);
}

TEST_F(BatchTest, ADelayLetsOthersJoinOnAnIdleDevice) {
  Executor::Options options;
  options.max_delay = absl::Seconds(60);
  options.max_batch_tokens = 3;
  Start(options);
  Submit("a", 1, &flow_a_);
  Submit("b", 1, &flow_a_);
  EXPECT_EQ(executor_->depth(), 2);
  // What cannot be joined does not wait for company, nor does a job whose deadline is near.
  EXPECT_TRUE(Submit("alone", 1, &flow_b_, /*joinable=*/false).Wait().ok());
  Recorded& urgent = Add("urgent", 1, &flow_b_);
  urgent.job->deadline = absl::Now() + absl::Milliseconds(200);
  executor_->Submit(urgent.job);
  urgent.state->ended.WaitForNotification();
  EXPECT_EQ(executor_->depth(), 2);
  Submit("c", 1, &flow_a_);  // full
  executor_->Drain();
  EXPECT_EQ(batches_.back(), "a+b+c");
}

}  // namespace
}  // namespace spmmd::server
