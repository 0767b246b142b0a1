// Trains with the C++ API of ONNX Runtime (headers around its C API), and the shared library of any stock build:
//
//   train STAGES DATA STEPS CHECKPOINT.safetensors [START.safetensors]
//
// STAGES is an output folder of `ortc compile --target onnxruntime`; DATA a folder with an .npy for each of the model's inputs
// and for the targets. Batches are taken in stored order, over and over; too few samples for one at the end are left out.
// plan.json says of every input and output of the graphs which role it plays and what it belongs to: nothing here knows
// the model.
#include <onnxruntime_cxx_api.h>

#include <cmath>
#include <cstdio>
#include <optional>

#include "formats.hpp"

constexpr int64_t BATCH_SIZE = 32;

// What a port stands for; a state under the name that it has in checkpoints.
string key(const Json& port) {
  if (port["of"].is_null()) return port["name"].text;
  return port["role"].text == "state" ? port["of"].text + "/" + port["slot"].text : port["of"].text;
}

bool is_kept(const string& role) { return role == "parameter" || role == "buffer" || role == "state"; }

using Made = std::vector<std::pair<const Json*, Ort::Value>>;

// How a session computes what was compiled. The C API has no option for the order of nodes, which is about memory alone.
Ort::SessionOptions session_options(const Json& how) {
  Ort::SessionOptions options;
  for (const auto& [name, value] : how["config_entries"].fields) options.AddConfigEntry(name.c_str(), value.text.c_str());
  string disabled;
  for (const Json& name : how["disabled_optimizers"].items) disabled += (disabled.empty() ? "" : ";") + name.text;
  options.AddConfigEntry("optimization.disable_specified_optimizers", disabled.c_str());
  if (how["reuse_memory"].text == "false") options.DisableMemPattern();
  return options;
}

// One graph of the plan, and its session.
struct Phase {
  const Json& graph;
  Ort::Session session;

  Phase(Ort::Env& env, const string& folder, const Json& graph_, const Json& how)
      : graph(graph_), session(env, (folder + "/" + graph["file"].text).c_str(), session_options(how)) {}

  // `in_place`: new parameters and states are written into the memory of the old ones.
  Made run(Tensors& values, const Tensors& given, const std::map<string, double>& scalars, bool in_place) {
    Ort::IoBinding binding(session);
    for (const Json& port : graph["inputs"].items) {
      const string role = port["role"].text, name = key(port);
      const Tensors& from = is_kept(role) ? values : given;
      if (role == "scalar" && scalars.count(name)) {
        const int64_t integer = scalars.at(name);
        const float real = scalars.at(name);
        const Type& type = find_type(port["dtype"].text);
        binding.BindInput(port["name"].text.c_str(), tensor(type, {}, type.bytes == 8 ? (const void*)&integer : &real));
      } else if (role != "scalar" && from.count(name)) {
        binding.BindInput(port["name"].text.c_str(), from.at(name));
      } else {
        throw std::runtime_error(graph["file"].text + " wants the " + role + " '" + name + "'");
      }
    }
    const Ort::MemoryInfo memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    for (const Json& port : graph["outputs"].items)
      if (in_place && is_kept(port["role"].text) && port["role"].text != "buffer") binding.BindOutput(port["name"].text.c_str(), values.at(key(port)));
      else binding.BindOutput(port["name"].text.c_str(), memory);
    session.Run(Ort::RunOptions(), binding);
    Made made;
    for (Ort::Value& value : binding.GetOutputValues())
      made.emplace_back(&graph["outputs"].items[made.size()], std::move(value));
    return made;
  }
};

// The recipe's learning rate at a step from 1 to total; docs/recipe.schema.json describes the fields.
double learning_rate(const Json& recipe, double step, double total) {
  const double base = recipe["base"].number(), last = recipe["final"].number(), warmup = recipe["warmup"].number();
  if (step < warmup) return base * step / warmup;
  const double x = std::clamp((step - warmup) / std::max(total - warmup, 1.0), 0.0, 1.0);
  const string& schedule = recipe["schedule"].text;
  if (schedule == "linear") return base - (base - last) * x;
  if (schedule == "cosine") return last + (base - last) * (1 + std::cos(std::acos(-1.0) * x)) / 2;
  if (schedule == "polynomial") return last + (base - last) * std::pow(1 - x, recipe["power"].number());
  return base;
}

int main(int argc, char** argv) try {
  if (argc < 5) throw std::runtime_error("usage: train STAGES DATA STEPS CHECKPOINT.safetensors [START.safetensors]");
  const string folder = argv[1], source = read(folder + "/plan.json");
  const int64_t steps = std::stoll(argv[3]);
  const Json plan = JsonReader(source).value();
  if (plan["version"].text != "1" || plan["stages"].items.size() != 1)
    throw std::runtime_error("this loop trains a plan of version 1 with one stage");
  Ort::Env env;
  const Json& phases = plan["stages"].items[0]["phases"];
  const Json& how = plan["sessions"];
  Phase train(env, folder, phases["train"], how["training"]);
  std::optional<Phase> optimizer;  // with --fuse-update there is none: the train phase does its work
  if (phases.fields.count("optimizer")) optimizer.emplace(env, folder, phases["optimizer"], how["others"]);

  Tensors values;  // parameters, buffers and states
  int64_t step = load(argc > 5 ? argv[5] : folder + "/" + plan["checkpoint"].text + "/step-0/parameters.safetensors", values);
  for (const Json& port : (optimizer ? *optimizer : train).graph["inputs"].items)
    if (port["role"].text == "state" && !values.count(key(port))) {  // not in the file
      const void* start = port["initial"].text == "parameter" ? values.at(port["of"].text).GetTensorRawData() : nullptr;
      values.emplace(key(port), tensor(find_type(port["dtype"].text), port["shape"].numbers(), start));
    }
  std::map<string, Npy> data;
  for (const Json& port : train.graph["inputs"].items)
    if (port["role"].text == "data" || port["role"].text == "label")
      data.emplace(key(port), Npy(string(argv[2]) + "/" + key(port) + ".npy"));
  const int64_t batches = data.empty() ? 0 : data.begin()->second.shape.at(0) / BATCH_SIZE;
  if (!batches) throw std::runtime_error(string(argv[2]) + " has not the samples of one batch");
  const Json& recipe = plan["recipe"];
  const double max_norm = recipe["optimizer"]["max_norm"].is_null() ? INFINITY : recipe["optimizer"]["max_norm"].number();

  while (step < steps) {
    Tensors batch, gradients;
    for (const auto& [name, array] : data) batch.emplace(name, array.batch(step % batches, BATCH_SIZE));
    ++step;
    // Dropout draws its masks from these three counters; 0 is the only micro-batch.
    const double lr = learning_rate(recipe["learning_rate"], step, steps);
    std::map<string, double> scalars{{"seed", recipe["seed"].number()}, {"step", step}, {"micro_batch", 0}, {"lr", lr}};
    Made made = train.run(values, batch, scalars, !optimizer);
    double loss = 0, square = 0;
    for (auto& [port, value] : made) {
      const float* numbers = value.GetTensorData<float>();
      if ((*port)["role"].text == "loss") loss = *numbers;
      if ((*port)["role"].text != "gradient") continue;
      const size_t size = value.GetTensorTypeAndShapeInfo().GetElementCount();
      for (size_t i = 0; i < size; ++i) square += double(numbers[i]) * numbers[i];
      gradients.emplace(key(*port), std::move(value));
    }
    const double norm = std::sqrt(square);
    // With an optimizer phase nothing has changed so far: a step that went wrong could be left out, and the next batch tried.
    if (!std::isfinite(loss + norm)) throw std::runtime_error("step " + std::to_string(step) + " is not finite");
    // A graph reads no parameter and no state after it has written the new one, so both can be in the same memory.
    if (optimizer) optimizer->run(values, gradients, {{"step", step}, {"lr", lr}, {"gradient_scale", std::min(1.0, max_norm / norm)}}, true);
    for (auto& [port, value] : made)  // running statistics are the next step's inputs
      if ((*port)["role"].text == "buffer") values.insert_or_assign(key(*port), std::move(value));
    std::printf("step %lld: loss %.9g, lr %.9g\n", (long long)step, loss, lr);
  }
  save(argv[4], values, step);
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 2;
}
