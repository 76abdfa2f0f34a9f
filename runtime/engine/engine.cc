// SPDX-License-Identifier: Apache-2.0
// The spine. Everything between a submitted request and its tokens happens in step(), in seven verbs.
#include "runtime/engine/engine.h"

#include <algorithm>
#include <chrono>

#include "runtime/engine/engine_parts.h"

namespace moelora {

bool Engine::Parts::step() {
  const double start = now_ms();
  {
    const std::lock_guard<std::mutex> lock(mutex);
    admit(start);                        // submitted requests become sequences; the cancelled and late leave
    scheduler->schedule(batch_, start);  // who runs, with how many tokens; pages and adapter slots are taken
    admit_prefetches();
  }
  swap_pages();  // what was preempted to the host, what resumes back
  if (!batch_.entries.empty()) {
    stage();    // the batch as flat arrays; the device is told of adapters that have arrived
    forward();  // layers; logits of the wanted rows
    if (device->is_asynchronous()) {
      emit();  // what the step before gave, while this one runs
    }
    sample();  // one token for each sampled row
  }
  const double end = now_ms();
  {
    const std::lock_guard<std::mutex> lock(mutex);
    commit(end);  // sequences advance or finish; pages and slots go back
    if (!batch_.entries.empty()) {
      record_step(start, end);
    }
    if (options.audit >= 2) {
      audit_parts();
    }
  }
  // Tokens and ends to their readers, unless the next step will start first.
  if (batch_.entries.empty() || !device->is_asynchronous() || scheduler->running().empty()) {
    emit();
  }
  return !batch_.entries.empty();
}

void Engine::Parts::admit(double now) {
  poll_loads(now);
  if (collect_adapters) {
    adapters->collect();
  }
  collect_adapters = false;
  while (trim_pages >= 0 && pool->num_pages() - pool->num_free() > trim_pages && scheduler->reclaim_idle()) {
  }
  trim_pages = -1;
  admit_inbox();
  end_by_host(now);
}

void Engine::Parts::admit_inbox() {
  for (std::shared_ptr<Sequence>& sequence : inbox) {
    sequence->arrival = ++arrivals;
    scheduler->add(std::move(sequence));
  }
  inbox.clear();
}

void Engine::Parts::stage() {
  adapters->publish(*stream);
  for (const BatchEntry& entry : batch_.entries) {
    Sequence& sequence = *entry.sequence;
    if (sequence.started_ms == 0) {
      sequence.started_ms = now_ms();
    }
  }
  step_input->stage(batch_, *pool, *adapters);
  step_input->push(*stream);
}

void Engine::Parts::forward() {
  const ProfileRange range(*stream, batch_.num_prefill_rows > 0 ? "prefill" : "decode", batch_.num_rows);
  Graph* graph = graph_of_batch();
  if (graph != nullptr) {
    device->launch(*graph, *stream);
  } else {
    model->forward(step_input->forward_input(), *workspace, *stream);
  }
  device->pull(workspace->totals().mirror(), 0, workspace->totals().bytes(), *stream);
}

void Engine::Parts::sample() {
  const ProfileRange range(*stream, "sample", step_input->num_sampled());
  step_input->stage_sampling();
  SampleTokensArgs args;
  args.logits = workspace->logits;
  args.num_rows = step_input->num_sampled();
  args.vocab_size = config.vocab_size;
  args.rows = step_input->sample_rows();
  args.outputs = outputs_.data();
  kernels->sample_tokens(args, *stream);
  device->synchronize(*stream);
}

void Engine::Parts::commit(double now) {
  for (const BatchEntry& entry : batch_.entries) {
    Sequence& sequence = *entry.sequence;
    sequence.kv->length = entry.first + entry.count;
    count_prompt(sequence, entry);
  }
  if (batch_.entries.empty()) {
    return;
  }
  cache_blocks();
  keep_captured_rows();
  for (int32_t i = 0; i < step_input->num_sampled(); ++i) {
    commit_token(*step_input->sampled()[static_cast<size_t>(i)], i, now);
  }
}

void Engine::Parts::commit_token(Sequence& sequence, int32_t sampled_index, double now) {
  const SampleOutput& output = outputs_[static_cast<size_t>(sampled_index)];
  if (output.status != 0) {
    end_sequence(sequence, FinishReason::kError, Status::kCorrupt,
                 "the logits of output token " + std::to_string(sequence.num_outputs()) +
                     " are not finite: weights of the model or the adapter, or the scale, overflow",
                 now);
    return;
  }
  const Request& request = sequence.request();
  if (sequence.num_outputs() == 0) {
    sequence.first_token_ms = now;
    sequence.result.first_token_ms = now - sequence.submission->submitted_ms;
  }
  sequence.tokens.push_back(output.token);
  step_input->count_token(sequence, output.token);
  ++counters.output_tokens;
  if (request.adapter != nullptr) {
    ++request.adapter->tokens;
  }
  Emission& emission = emissions_[num_emissions_++];
  emission.submission = sequence.submission;
  emission.sampled_index = sampled_index;
  emission.position = sequence.num_outputs() - 1;
  emission.in_text = true;
  emission.finished = false;

  const auto stop = std::find(request.stop_tokens.begin(), request.stop_tokens.end(), output.token);
  const bool is_eos =
      !request.sampling.ignore_eos &&
      std::find(config.eos_token_ids.begin(), config.eos_token_ids.end(), output.token) != config.eos_token_ids.end();
  if (stop != request.stop_tokens.end() || is_eos) {
    const auto index = static_cast<size_t>(stop - request.stop_tokens.begin());
    sequence.result.stop_index = stop == request.stop_tokens.end() ? -1 : request.stop_number(index);
    emission.in_text = false;
    end_sequence(sequence, FinishReason::kStop, Status::kOk, "", now);
  } else if (const int32_t number = sequence.stop_string(output.token); number >= 0) {
    sequence.result.stop_index = number;
    end_sequence(sequence, FinishReason::kStop, Status::kOk, "", now);
  } else if (sequence.tokens.size() == sequence.tokens_max) {
    end_sequence(sequence, FinishReason::kLength, Status::kOk, "", now);
  }
}

void Engine::Parts::emit() {
  finish_prefetches();
  deliver();
}

void Engine::Parts::deliver() {
  for (size_t i = 0; i < num_emissions_; ++i) {
    Emission& emission = emissions_[i];
    TokenStream& out = *emission.submission->stream;
    if (emission.sampled_index >= 0) {
      const SampleOutput& output = outputs_[static_cast<size_t>(emission.sampled_index)];
      const int32_t wanted = emission.submission->request.sampling.logprobs;
      TopLogprob logprobs[kMaxTopLogprobs + 1];
      size_t count = 0;
      if (wanted >= 0) {
        logprobs[count++] = {emission.position, output.token, output.logprob, output.rank};
      }
      for (int32_t top = 0; top < wanted; ++top) {
        logprobs[count++] = {emission.position, output.top_ids[top], output.top_logprobs[top], top + 1};
      }
      out.emit(output.token, logprobs, count, emission.in_text);
    }
    if (emission.finished) {
      out.finish(emission.result);
    }
    emission.submission.reset();
  }
  num_emissions_ = 0;
  progress.notify_all();
}

void Engine::Parts::run() {
  bool entered = false;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex);
      if (stopping) {
        return;
      }
      const bool has_work = !inbox.empty() || !prefetches.empty() || adapters->is_loading() || collect_adapters ||
                            trim_pages >= 0 || !scheduler->running().empty() || !scheduler->waiting().empty();
      if (!has_work && probes_wanted == probes_done) {
        work.wait(lock, [&] { return stopping || woken; });
        woken = false;
        if (stopping) {
          return;
        }
      }
    }
    try {
      if (!entered) {
        device->enter_thread();
        entered = true;
      }
      probe_bandwidth_now();
      if (step()) {
        continue;
      }
    } catch (const Error& error) {
      fail(error.status(), error.what());
      return;
    } catch (const std::exception& error) {
      fail(Status::kInternal, error.what());
      return;
    }
    // Nothing could run (readers behind, or slots and pages short): wait for a change, but watch deadlines.
    std::unique_lock<std::mutex> lock(mutex);
    work.wait_for(lock, std::chrono::milliseconds(5), [&] { return stopping || woken; });
    woken = false;
  }
}

}  // namespace moelora
