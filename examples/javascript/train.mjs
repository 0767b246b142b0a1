// Trains in Node with the stock onnxruntime-node package:
//
//   node train.mjs STAGES DATA STEPS CHECKPOINT.safetensors [START.safetensors]
//
// STAGES is an output folder of `ortc compile --target onnxruntime`; DATA a folder with an .npy for each of the model's inputs
// and for the targets. Batches are taken in stored order, over and over; too few samples for one at the end are left out.
import { readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import ort from "onnxruntime-node";
import { ARRAYS, Trainer, learningRate } from "./trainer.mjs";

const BATCH_SIZE = 32;
const NPY_TYPES = { "<f4": "float32", "<f8": "float64", "<i8": "int64", "<i4": "int32", "|b1": "bool" };

/** A tensor from an .npy file: magic and version, the length of a header (2 bytes), the header (a Python dict), the numbers. */
async function readNpy(file) {
  const bytes = await readFile(file);
  const start = 10 + bytes.readUInt16LE(8);
  const header = bytes.toString("latin1", 10, start);
  const dtype = NPY_TYPES[/'descr': '([^']+)'/.exec(header)?.[1]];
  if (bytes[6] !== 1 || !dtype || !header.includes("'fortran_order': False")) throw new Error(`${file}: cannot read ${header}`);
  const dims = /'shape': \(([^)]*)\)/.exec(header)[1].split(",").filter((size) => size.trim()).map(Number);
  const { buffer } = Uint8Array.from(bytes.subarray(start)); // a copy: typed arrays must be aligned
  return new ort.Tensor(dtype, new ARRAYS[dtype](buffer), dims);
}

const [stages, folder, steps, output, start] = process.argv.slice(2);
const read = (file) => readFile(path.join(stages, file));
const trainer = await Trainer.open(ort, read, start && (await readFile(start)));
const data = {};
for (const { role, of } of trainer.phases.train.inputs)
  if (role === "data" || role === "label") data[of] = await readNpy(path.join(folder, `${of}.npy`));
const batches = Math.floor(Object.values(data)[0].dims[0] / BATCH_SIZE);
if (!batches) throw new Error(`${folder} has fewer than ${BATCH_SIZE} samples`);

while (trainer.step < Number(steps)) {
  const first = (trainer.step % batches) * BATCH_SIZE;
  const batch = {};
  for (const [name, { type, data: numbers, dims }] of Object.entries(data)) {
    const size = numbers.length / dims[0];
    const part = numbers.subarray(first * size, (first + BATCH_SIZE) * size);
    batch[name] = new ort.Tensor(type, part, [BATCH_SIZE, ...dims.slice(1)]);
  }
  const lr = learningRate(trainer.plan.recipe.learning_rate, trainer.step + 1, Number(steps));
  const loss = await trainer.train(batch, lr);
  console.log(`step ${trainer.step}: loss ${loss}, lr ${lr}`);
}
await writeFile(output, trainer.save());
