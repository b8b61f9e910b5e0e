// Open block stores, which other operators read too.

#pragma once

#include "engine.h"

namespace sparrow::block_io {

struct Open {
  Engine* engine;
  bool is_ring;
  pid_t process;
  Store store;
  int64_t tickets = 0;
};

Open& opened(int64_t handle);  // by the operator that opens it

template <class T>
T* data(const Tensor& tensor, ScalarType type, const char* name) {
  check(tensor.scalar_type() == type && tensor.dim() == 1 && tensor.is_contiguous(), name,
        ": expected a contiguous tensor with one dimension and the documented dtype");
  return static_cast<T*>(tensor.data_ptr());
}

// The fields of a record in some rows.
inline std::vector<Field> fields_of(const std::vector<Tensor>& tensors, const Store& store) {
  check(tensors.size() == store.fields().size(), "block_io: expected a tensor for each field");
  std::vector<Field> fields;
  for (size_t f = 0; f < tensors.size(); ++f) {
    const int64_t bytes = store.fields()[f], rows = tensors[f].size(0);
    check(tensors[f].is_contiguous() && tensors[f].numel() * int64_t(tensors[f].element_size()) == rows * bytes,
          "block_io: a field is not contiguous or has another width");
    fields.push_back({static_cast<uint8_t*>(tensors[f].data_ptr()), bytes});
  }
  return fields;
}

}  // namespace sparrow::block_io
