// Finds the place of a collective like `Locator.place_ids`, where no Python code has to run: in
// modules, outside of passes, and in a backward whose node a module call has made. Runs with the GIL.
#pragma once

#include <cstring>
#include <iterator>
#include <typeinfo>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "modules.h"
#include "owned.h"

namespace torchwhere {

// The number of nodes that accumulate gradients: all of them have it.
constexpr uint64_t ACCUMULATE_GRAD_SEQ = UINT64_MAX;

// A track that may have made a node, and the entry of its log that says where.
struct Maker {
  ThreadTrack* track = nullptr;
  int64_t position = 0;
};

// Keeps the makers for which a condition holds, unless it holds for none.
template <typename Condition>
void prefer(std::vector<Maker>* makers, const Condition& condition) {
  std::vector<Maker> preferred;
  std::copy_if(makers->begin(), makers->end(), std::back_inserter(preferred), condition);
  if (!preferred.empty()) makers->swap(preferred);
}

// Finds the track that made a node, like `Threads.maker`. Its `track` is null if none is known.
inline Maker maker_of(uint64_t seq, const ThreadTrack* own, const Box* box, bool* is_certain) {
  std::vector<Maker> makers;
  for (ThreadTrack* track : logged_tracks) {
    int64_t position = position_in_log(track, seq);
    if (position >= 0) makers.push_back({track, position});
  }
  prefer(&makers, [seq](const Maker& maker) {
    return seq < maker.track->seqs_at[(maker.track->count - 1) & LOG_MASK];
  });
  prefer(&makers, [](const Maker& maker) { return maker.position > 0; });
  auto own_maker = std::find_if(
      makers.begin(), makers.end(), [own](const Maker& maker) { return maker.track == own; });
  bool calls_backward = (own->top >> PASS_SHIFT & PASS_MASK) == BACKWARD_PASS;
  if (calls_backward && own_maker != makers.end()) {
    *is_certain = makers.size() == 1;
    return *own_maker;
  }
  prefer(&makers, [own](const Maker& maker) { return maker.track != own; });
  *is_certain = makers.size() == 1;
  if (makers.empty()) return {};
  prefer(&makers, [box](const Maker& maker) { return maker.track->cursor == box->main_cursor; });
  return makers.front();
}

// As in `hooks/threads.py`.
constexpr uint64_t RECOMPUTE_BIT = static_cast<uint64_t>(RECOMPUTE_PASS ^ FORWARD_PASS) << PASS_SHIFT;
constexpr uint64_t NO_CALL = 0xFFFFFFFF, REGIONS = 1 << 12;

// A recomputed region: the node that started it, and the track that made this node.
struct Region {
  ThreadTrack* forward = nullptr;
  uint64_t seq = 0;
  bool is_reentrant = false;
};

inline Region region_of(ThreadTrack* track, uint64_t number) {
  auto* object = reinterpret_cast<PyObject*>(track);
  Owned regions(PyObject_GetAttrString(object, "regions"));
  Owned makers(PyObject_GetAttrString(object, "makers"));
  Py_buffer view{};
  Region region;
  if (regions.get() != nullptr && PyObject_GetBuffer(regions.get(), &view, PyBUF_SIMPLE) == 0) {
    if (view.len == static_cast<Py_ssize_t>(REGIONS * sizeof(uint64_t))) {
      uint64_t word = static_cast<uint64_t*>(view.buf)[number];
      region.seq = word >> 1;
      region.is_reentrant = word & 1;
    }
    PyBuffer_Release(&view);
  }
  auto at = static_cast<Py_ssize_t>(number);
  bool has_maker = makers.get() != nullptr && PyList_Check(makers.get()) &&
      at < PyList_GET_SIZE(makers.get()) && PyList_GET_ITEM(makers.get(), at) != Py_None;
  if (has_maker)
    region.forward = reinterpret_cast<ThreadTrack*>(PyList_GET_ITEM(makers.get(), at));
  PyErr_Clear();
  return region;
}

// The call number of a recomputed module in its forward, like `Track.recomputed_call`.
inline uint64_t recomputed_call(ThreadTrack* track, uint64_t place) {
  constexpr uint64_t region_mask = REGIONS - 1;
  Region region = region_of(track, place & region_mask);
  ThreadTrack* forward = region.forward;
  if (forward == nullptr || forward->marks_at == nullptr) return NO_CALL;
  auto count = static_cast<int64_t>(forward->count);
  int64_t oldest = std::max<int64_t>(0, count - static_cast<int64_t>(LOG_MASK) - 1);
  int64_t at = position_in_log(forward, region.seq), by = region.is_reentrant ? 1 : -1;
  if (at < 0) return NO_CALL;
  for (at += region.is_reentrant; at >= oldest && at < count; at += by) {
    uint64_t mark = forward->marks_at[static_cast<uint64_t>(at) & LOG_MASK];
    if ((mark & ~RECOMPUTE_BIT) >> PASS_SHIFT != (place & ~RECOMPUTE_BIT) >> PASS_SHIFT) continue;
    if (!(mark & RECOMPUTE_BIT)) return mark & CALL_MASK;
    if ((mark ^ place) & region_mask) return recomputed_call(forward, mark);
  }
  return NO_CALL;
}

// Sets the module and the call of a place in the log of a track, or at its top.
inline void set_call(Record* record, ThreadTrack* track, uint64_t place) {
  bool is_recomputed = (place >> PASS_SHIFT & PASS_MASK) == RECOMPUTE_PASS;
  uint64_t call = is_recomputed ? recomputed_call(track, place) : place & CALL_MASK;
  record->module = static_cast<uint32_t>(place >> MODULE_SHIFT);
  record->call = static_cast<uint32_t>(call);
  if (is_recomputed && call == NO_CALL) record->flags |= FLAG_INFERRED;
}

// Whether a compiled backward runs this node: then the record also has the graph.
inline bool may_be_compiled(const torch::autograd::Node& node) {
  bool is_python = std::strstr(typeid(node).name(), "PyNode") != nullptr;
  return is_python && node.name().find("CompiledFunction") != std::string::npos;
}

// Sets the place of a record in a backward. Returns false if Python must find it.
inline bool set_place_in_backward(Record* record, const ThreadTrack* track, const Box* box) {
  record->pass = BACKWARD_PASS;
  auto node = torch::autograd::get_current_node();
  if (node == nullptr) return true;  // a callback of the engine
  uint64_t seq = node->sequence_nr();
  if (seq == ACCUMULATE_GRAD_SEQ || may_be_compiled(*node)) return false;
  bool is_certain = false;
  Maker maker = maker_of(seq, track, box, &is_certain);
  if (maker.track == nullptr) return false;
  uint64_t place = maker.track->marks_at[static_cast<uint64_t>(maker.position) & LOG_MASK];
  if (!is_certain) record->flags |= FLAG_INFERRED;
  if (place >= FIRST_MODULE_PLACE) set_call(record, maker.track, place);
  return true;
}

// Sets the place of a record. Returns false if Python must find it.
inline bool set_place(Record* record, ThreadTrack* track, const Box* box) {
  uint64_t pass = track->top >> PASS_SHIFT & PASS_MASK;
  record->pass = static_cast<uint8_t>(pass);
  if (track->top >= FIRST_MODULE_PLACE) {
    set_call(record, track, track->top);
    return pass == FORWARD_PASS || pass == RECOMPUTE_PASS;
  }
  if (pass == OPTIMIZER_PASS) return false;
  bool runs_nodes = torch::autograd::get_current_graph_task_id() != -1;
  return !runs_nodes || set_place_in_backward(record, track, box);
}

}  // namespace torchwhere
