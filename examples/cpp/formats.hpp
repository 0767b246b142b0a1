// The files that a training loop reads and writes: plan.json, arrays (.npy), checkpoints (.safetensors).
#pragma once
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

using std::string;
using Shape = std::vector<int64_t>;

// JSON. Of a number, true, false and null the text is kept.
struct Json {
  string text;
  std::vector<Json> items;
  std::map<string, Json> fields;

  const Json& operator[](const string& name) const {
    auto found = fields.find(name);
    if (found == fields.end()) throw std::runtime_error("the JSON lacks '" + name + "'");
    return found->second;
  }
  bool is_null() const { return text == "null"; }
  double number() const { return std::stod(text); }
  std::vector<int64_t> numbers() const {
    std::vector<int64_t> all;
    for (const Json& item : items) all.push_back(std::stoll(item.text));
    return all;
  }
};

class JsonReader {
 public:
  explicit JsonReader(const string& source) : source_(source) {}

  Json value() {
    Json made;
    if (take('{')) {
      while (!take('}')) {
        string name = quoted_text();
        expect(':');
        made.fields[name] = value();
        take(',');
      }
    } else if (take('[')) {
      while (!take(']')) {
        made.items.push_back(value());
        take(',');
      }
    } else if (peek() == '"') {
      made.text = quoted_text();
    } else {
      while (at_ < source_.size() && !std::strchr(",]} \n\r\t", source_[at_])) made.text += source_[at_++];
      if (made.text.empty()) throw std::runtime_error("this is not JSON");
    }
    return made;
  }

 private:
  char peek() {
    while (at_ < source_.size() && std::strchr(" \n\r\t", source_[at_])) ++at_;
    return at_ < source_.size() ? source_[at_] : '\0';
  }
  bool take(char wanted) { return peek() == wanted && ++at_; }
  void expect(char wanted) {
    if (!take(wanted)) throw std::runtime_error(string("the JSON lacks a ") + wanted);
  }
  string quoted_text() {
    string text;
    expect('"');
    while (source_.at(at_) != '"') {
      char c = source_[at_++];
      if (c != '\\') text += c;
      else if ((c = source_.at(at_++)) != 'u') text += c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
      else text += char(std::stoi(source_.substr(at_, 4), nullptr, 16)), at_ += 4;  // ASCII; the rest comes as it is, in UTF-8
    }
    ++at_;
    return text;
  }

  const string& source_;
  size_t at_ = 0;
};

string quoted(const string& text) {
  string made = "\"";
  for (char c : text) made += c == '"' || c == '\\' ? string{'\\', c} : string{c};
  return made + '"';
}

string list(const Shape& numbers) {
  string made;
  for (int64_t number : numbers) made += (made.empty() ? "" : ", ") + std::to_string(number);
  return "[" + made + "]";
}

using Tensors = std::map<string, Ort::Value>;

struct Type {
  const char *plan, *safetensors, *npy;
  ONNXTensorElementDataType onnx;
  size_t bytes;
};
constexpr Type TYPES[] = {{"float32", "F32", "<f4", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
                          {"float64", "F64", "<f8", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
                          {"int64", "I64", "<i8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
                          {"int32", "I32", "<i4", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
                          {"bool", "BOOL", "|b1", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1}};

const Type& find_type(const string& name) {
  for (const Type& type : TYPES)
    if (name == type.plan || name == type.safetensors || name == type.npy) return type;
  throw std::runtime_error("this loop holds no values of type " + name);
}

int64_t count(const Shape& shape) { return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()); }

// A tensor with memory of its own: a copy of the content, or zeros.
Ort::Value tensor(const Type& type, const Shape& shape, const void* content = nullptr) {
  Ort::Value made = Ort::Value::CreateTensor(Ort::AllocatorWithDefaultOptions(), shape.data(), shape.size(), type.onnx);
  if (content) std::memcpy(made.GetTensorMutableRawData(), content, count(shape) * type.bytes);
  else std::memset(made.GetTensorMutableRawData(), 0, count(shape) * type.bytes);
  return made;
}

string read(const string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Bytes of a file, which must be there.
const char* part(const string& bytes, size_t from, size_t length) {
  if (from > bytes.size() || length > bytes.size() - from) throw std::runtime_error("the file is cut off");
  return bytes.data() + from;
}

// An .npy file: magic and version, the length of a header (2 bytes), the header (a Python dict), the numbers.
struct Npy {
  string bytes;
  size_t start;
  const Type* type;
  Shape shape;

  explicit Npy(const string& path) : bytes(read(path)) {
    start = 10 + uint8_t(bytes.at(8)) + 256 * uint8_t(bytes.at(9));
    string header = bytes.substr(10, start - 10);
    auto after = [&](const char* label) { return header.substr(header.find(label) + std::strlen(label)); };
    if (bytes[6] != 1 || after("'fortran_order': ")[0] != 'F') throw std::runtime_error(path + ": cannot read " + header);
    type = &find_type(after("'descr': '").substr(0, 3));
    for (char* at = header.data() + header.find("'shape': (") + 10; std::isdigit(*at); at += std::strspn(at, ", "))
      shape.push_back(std::strtoll(at, &at, 10));
  }

  // The i-th batch of so many samples.
  Ort::Value batch(int64_t i, int64_t samples) const {
    Shape sizes = shape;
    sizes.at(0) = samples;
    const size_t length = count(sizes) * type->bytes;
    return tensor(*type, sizes, part(bytes, start + i * length, length));
  }
};

// A safetensors file: the length of a header (8 bytes), the header in JSON, the tensors. Returns the step that it notes.
int64_t load(const string& path, Tensors& values) {
  string bytes = read(path);
  uint64_t length = 0;
  std::memcpy(&length, part(bytes, 0, 8), 8);
  string text(part(bytes, 8, length), length);
  Json header = JsonReader(text).value();
  int64_t step = 0;
  for (const auto& [name, entry] : header.fields)
    if (name != "__metadata__") {
      const Type& type = find_type(entry["dtype"].text);
      const Shape shape = entry["shape"].numbers();
      const char* content = part(bytes, 8 + length + entry["data_offsets"].numbers().at(0), count(shape) * type.bytes);
      values.insert_or_assign(name, tensor(type, shape, content));
    } else if (entry.fields.count("step")) {
      step = std::stoll(entry["step"].text);
    }
  return step;
}

void save(const string& path, const Tensors& values, int64_t step) {
  string header = "{\"__metadata__\": {\"step\": \"" + std::to_string(step) + "\"}", content;
  for (const auto& [name, value] : values) {
    auto info = value.GetTensorTypeAndShapeInfo();
    const Type& type = *std::find_if(TYPES, std::end(TYPES), [&](const Type& t) { return t.onnx == info.GetElementType(); });
    size_t from = content.size();
    content.append(static_cast<const char*>(value.GetTensorRawData()), info.GetElementCount() * type.bytes);
    header += ", " + quoted(name) + ": {\"dtype\": \"" + type.safetensors + "\", \"shape\": " + list(info.GetShape()) +
              ", \"data_offsets\": " + list({int64_t(from), int64_t(content.size())}) + "}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the tensors are aligned
  uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8) << header << content;
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}
