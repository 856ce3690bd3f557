// Completes the text of a note with numbers that the device had not computed when it was written.
//
// The text is JSON with a placeholder of NUMBER_WIDTH bytes for each number. When a number arrives,
// it replaces its placeholder, and the checksum of the text changes with it. A text that the ring has
// overwritten meanwhile stays as it is.
#pragma once

#include <algorithm>
#include <cmath>
#include <locale>
#include <sstream>
#include <string>

#include "device_progress.h"

namespace torchwhere {

constexpr size_t NUMBER_WIDTH = 24;  // of -1.7976931348623157e+308, the longest one
constexpr size_t TEXT_HEAD = 16, TEXT_LENGTH_AT = 8, TEXT_CRC_AT = 12;  // of a text in a box
constexpr const char* NOT_READ = "\"not read\"";

// -- numbers as JSON ------------------------------------------------------------------------------

// The shortest text that gives the same number of this type, in any locale of the job.
template <typename Number>
std::string decimal(Number number) {
  auto value = static_cast<double>(number);
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  for (int digits = 1;; ++digits) {
    std::stringstream text;
    text.imbue(std::locale::classic());
    text.precision(digits);
    text << value;
    double parsed = 0;
    bool is_in_range = static_cast<bool>(text >> parsed);  // not after rounding up the largest
    bool is_same = is_in_range && static_cast<double>(static_cast<Number>(parsed)) == value;
    if (is_same || digits == 17) return text.str();
  }
}

template <typename Number>
Number number_at(const Numbers& numbers, size_t at) {
  Number number;
  std::memcpy(&number, numbers.data + at * sizeof(Number), sizeof(Number));
  return number;
}

inline std::string json_of(const Numbers& numbers, size_t at) {
  switch (numbers.type) {
    case at::kDouble: return decimal(number_at<double>(numbers, at));
    case at::kFloat: return decimal(number_at<float>(numbers, at));
    case at::kHalf: return decimal(number_at<at::Half>(numbers, at));
    case at::kBFloat16: return decimal(number_at<at::BFloat16>(numbers, at));
    case at::kLong: return std::to_string(number_at<int64_t>(numbers, at));
    case at::kInt: return std::to_string(number_at<int32_t>(numbers, at));
    case at::kShort: return std::to_string(number_at<int16_t>(numbers, at));
    case at::kChar: return std::to_string(number_at<int8_t>(numbers, at));
    case at::kByte: return std::to_string(number_at<uint8_t>(numbers, at));
    // a view of other bytes as bool may hold any byte
    case at::kBool: return number_at<uint8_t>(numbers, at) != 0 ? "true" : "false";
    default: return NOT_READ;  // another type
  }
}

// -- the text -------------------------------------------------------------------------------------

// A text in the ring of texts of an open box.
class OpenText {
 public:
  OpenText(const Box* box, uint64_t text_at) : box_id_(box->id), text_at_(text_at) {
    const char* stored = reinterpret_cast<const char*>(box->words) + text_at;
    uint32_t length;
    std::memcpy(&length, stored + TEXT_LENGTH_AT, sizeof(length));
    // Texts of other threads may have gone all around the ring meanwhile.
    uint64_t most = static_cast<uint64_t>(box->view.len) - text_at - TEXT_HEAD;
    copy_.assign(stored, TEXT_HEAD + std::min<uint64_t>(length, most));
  }

  // Replaces the placeholder at an offset of the payload. Does nothing if the box was closed, or if
  // it is the box of another watch.
  void set(Box* box, size_t offset, std::string json) {
    std::unique_lock<std::mutex> guard(lock_, std::try_to_lock);
    if (!guard) {  // the harvester has it, and if its store faults, it waits for the GIL
      WithoutGil without_gil;
      guard.lock();
    }
    if (box->words == nullptr || box->id != box_id_) return;
    char* stored = reinterpret_cast<char*>(box->words) + text_at_;
    size_t at = TEXT_HEAD + offset;
    bool is_overwritten = std::memcmp(stored, copy_.data(), TEXT_HEAD) != 0;
    if (is_overwritten || json.size() > NUMBER_WIDTH || at + NUMBER_WIDTH > copy_.size()) return;
    json.resize(NUMBER_WIDTH, ' ');
    copy_.replace(at, NUMBER_WIDTH, json);
    std::string sealed = copy_.substr(0, TEXT_CRC_AT) + copy_.substr(TEXT_HEAD);
    uint32_t crc = crc32(sealed.data(), sealed.size());
    copy_.replace(TEXT_CRC_AT, sizeof(crc), reinterpret_cast<char*>(&crc), sizeof(crc));
    std::memcpy(stored + at, copy_.data() + at, NUMBER_WIDTH);
    std::memcpy(stored + TEXT_CRC_AT, copy_.data() + TEXT_CRC_AT, sizeof(crc));
  }

 private:
  std::mutex lock_;
  uint64_t box_id_, text_at_;
  std::string copy_;
};

// device_note(box, text_at, place, tensors, offsets): completes the text at this position of the box
// when the device has computed the numbers of these tensors. `tensors` has the addresses of their
// implementations, which must be alive. `offsets` has the offset of each placeholder in the payload.
// If a tensor cannot be read, the text says so at once.
inline PyObject* complete_note(PyObject* args) {
  PyObject *box_object, *tensors, *offsets;
  unsigned long long text_at, place;
  bool is_parsed = PyArg_ParseTuple(
      args, "OKKO!O!", &box_object, &text_at, &place, &PyList_Type, &tensors, &PyList_Type,
      &offsets);
  if (!is_parsed) return nullptr;
  auto* box = reinterpret_cast<Box*>(box_object);
  if (box->words == nullptr) return PyErr_Format(PyExc_ValueError, "the box is closed");
  auto text = std::make_shared<OpenText>(box, text_at);
  Py_ssize_t next = 0;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tensors); ++index) {
    auto* implementation =
        static_cast<at::TensorImpl*>(PyLong_AsVoidPtr(PyList_GET_ITEM(tensors, index)));
    if (implementation == nullptr) return nullptr;
    at::Tensor tensor(
        c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim_copy(implementation));
    std::vector<size_t> places;
    for (int64_t count = tensor.numel(); count > 0 && next < PyList_GET_SIZE(offsets); --count)
      places.push_back(PyLong_AsSize_t(PyList_GET_ITEM(offsets, next++)));
    if (PyErr_Occurred()) return nullptr;
    auto complete = [text, places](Box* box, const Numbers& numbers) {
      for (size_t at = 0; at < places.size(); ++at) text->set(box, places[at], json_of(numbers, at));
    };
    Mark mark{Point::PLACE, {-1, -1, 0}, place, box->step};
    if (holds_numbers(tensor) && device_progress->read(tensor, mark, complete)) continue;
    for (size_t offset : places) text->set(box, offset, NOT_READ);
  }
  Py_RETURN_NONE;
}

inline PyObject* device_note(PyObject*, PyObject* args) {
  try {
    return complete_note(args);
  } catch (const std::exception& error) {  // a tensor with symbolic sizes; a wrapper that raises
    return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_RuntimeError, "%s", error.what());
  }
}

}  // namespace torchwhere
