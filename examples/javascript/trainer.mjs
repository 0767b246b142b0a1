// Trains with an output folder of `ortc compile --target onnxruntime`, in Node as in a browser. plan.json says of every input
// and output of the graphs which role it plays and what it belongs to: nothing here knows the model.

export const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array,
};
const CODES = { F32: "float32", F64: "float64", I64: "int64", I32: "int32", BOOL: "bool" }; // those of safetensors

// What a port stands for; a state under the name that it has in checkpoints.
const key = (port) => (port.role === "state" ? `${port.of}/${port.slot}` : port.of ?? port.name);

export class Trainer {
  /** `ort`: the ONNX Runtime package; `read(path)`: bytes of a file of the folder; `checkpoint`: of a safetensors file. */
  static async open(ort, read, checkpoint) {
    const trainer = new Trainer();
    const plan = JSON.parse(new TextDecoder().decode(await read("plan.json")));
    if (plan.version !== 1 || plan.stages.length !== 1) throw new Error("this loop trains a plan of version 1 with one stage");
    Object.assign(trainer, { ort, plan, phases: plan.stages[0].phases, sessions: {}, step: 0 });
    for (const name of Object.keys(trainer.phases)) { // train, eval, optimizer; with --fuse-update train does the optimizer's work
      const options = sessionOptions(name === "train" ? plan.sessions.training : plan.sessions.others);
      trainer.sessions[name] = await ort.InferenceSession.create(await read(trainer.phases[name].file), options);
    }
    trainer.load(checkpoint ?? (await read(`${plan.checkpoint}/step-0/parameters.safetensors`)));
    return trainer;
  }

  /** Parameters, buffers and states, and the step that they are of. */
  load(bytes) {
    const { tensors, metadata } = readSafetensors(this.ort, bytes);
    this.values = tensors;
    this.step = Number(metadata.step ?? 0);
    for (const port of (this.phases.optimizer ?? this.phases.train).inputs) // states that the file has not
      if (port.role === "state")
        this.values[key(port)] ??= port.initial === "parameter" ? copy(this.ort, this.values[port.of], port) : zeros(this.ort, port);
  }

  /** A checkpoint that `load` takes, and `ortc run --restore` and `ortc export --restore`. */
  save() {
    return writeSafetensors(this.values, { step: String(this.step) });
  }

  /** One step on a batch of tensors by the names of the model's inputs, and the targets under theirs; returns the loss. */
  async train(batch, lr) {
    const step = this.step + 1;
    const { seed, optimizer } = this.plan.recipe;
    // Dropout draws its masks from these three counters; 0 is the only micro-batch.
    const made = await this.run("train", batch, { seed, step, micro_batch: 0, lr });
    const loss = made.find(([port]) => port.role === "loss")[1].data[0];
    const gradients = {};
    let square = 0;
    for (const [port, value] of made) {
      if (port.role !== "gradient") continue;
      gradients[key(port)] = value;
      for (const g of value.data) square += g * g;
    }
    const norm = Math.sqrt(square);
    // Nothing has changed so far: a step that went wrong can be left out, and the next batch tried.
    if (!Number.isFinite(loss + norm)) throw new Error(`step ${step}: loss ${loss}, norm of the gradients ${norm}`);
    const gradient_scale = Math.min(1, (optimizer.max_norm ?? Infinity) / norm);
    const updated = this.phases.optimizer ? await this.run("optimizer", gradients, { step, lr, gradient_scale }) : [];
    // What the optimizer makes (parameters, states), and the running statistics of the train phase, are the next step's inputs.
    for (const [port, value] of [...made, ...updated])
      if (["parameter", "state", "buffer"].includes(port.role)) this.values[key(port)] = value;
    this.step = step;
    return loss;
  }

  /** The loss, and the model's outputs by name, in inference form. */
  async evaluate(batch) {
    return Object.fromEntries((await this.run("eval", batch, {})).map(([port, value]) => [key(port), value]));
  }

  /** Runs a phase; returns its outputs as pairs of port and tensor. */
  async run(phase, given, scalars) {
    const { inputs, outputs } = this.phases[phase];
    const feeds = {};
    for (const port of inputs) {
      if (["parameter", "buffer", "state"].includes(port.role)) feeds[port.name] = this.values[key(port)];
      else if (port.role !== "scalar") feeds[port.name] = given[key(port)];
      else if (key(port) in scalars) feeds[port.name] = scalar(this.ort, port, scalars[key(port)]);
      if (feeds[port.name] === undefined) throw new Error(`the ${phase} phase wants the ${port.role} '${key(port)}'`);
    }
    const made = await this.sessions[phase].run(feeds);
    return outputs.map((port) => [port, made[port.name]]);
  }
}

function zeros(ort, { dtype, shape }) {
  return new ort.Tensor(dtype, new ARRAYS[dtype](shape.reduce((a, b) => a * b, 1)), shape);
}

function copy(ort, { type, data }, { shape }) {
  return new ort.Tensor(type, data.slice(), shape);
}

/** How a session computes what was compiled. Its package has no option for the order of nodes, which is about memory alone. */
function sessionOptions({ config_entries, disabled_optimizers, reuse_memory }) {
  const entries = { ...config_entries, "optimization.disable_specified_optimizers": disabled_optimizers.join(";") };
  const extra = {};
  for (const [name, value] of Object.entries(entries)) {
    const [group, option] = name.split(".");
    (extra[group] ??= {})[option] = value;
  }
  return { enableMemPattern: reuse_memory, extra };
}

function scalar(ort, { dtype }, number) {
  const value = dtype === "int64" ? BigInt(number) : number; // so JavaScript has 64-bit integers
  return new ort.Tensor(dtype, ARRAYS[dtype].of(value), []);
}

/** The recipe's learning rate at a step from 1 to total; docs/recipe.schema.json describes the fields. */
export function learningRate({ schedule, base, final, warmup, power }, step, total) {
  if (step < warmup) return (base * step) / warmup;
  const x = Math.min(Math.max((step - warmup) / Math.max(total - warmup, 1), 0), 1);
  if (schedule === "linear") return base - (base - final) * x;
  if (schedule === "cosine") return final + ((base - final) * (1 + Math.cos(Math.PI * x))) / 2;
  if (schedule === "polynomial") return final + (base - final) * (1 - x) ** power;
  return base;
}

// A safetensors file: the length of a header (8 bytes, little-endian), the header in JSON, the tensors one after the other.

function readSafetensors(ort, bytes) {
  const start = 8 + Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const { __metadata__: metadata = {}, ...entries } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
    const { buffer } = Uint8Array.from(bytes.subarray(start + from, start + to)); // a copy: typed arrays must be aligned
    tensors[name] = new ort.Tensor(CODES[dtype], new ARRAYS[CODES[dtype]](buffer), shape);
  }
  return { tensors, metadata };
}

function writeSafetensors(tensors, metadata) {
  const header = { __metadata__: metadata };
  let end = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    const dtype = Object.keys(CODES).find((code) => CODES[code] === type);
    header[name] = { dtype, shape: dims, data_offsets: [end, (end += data.byteLength)] };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const start = 8 + Math.ceil(text.length / 8) * 8; // padded with spaces, so that the tensors are aligned
  const bytes = new Uint8Array(start + end).fill(32, 8, start);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(start - 8), true);
  bytes.set(text, 8);
  for (const [name, { data }] of Object.entries(tensors))
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), start + header[name].data_offsets[0]);
  return bytes;
}
