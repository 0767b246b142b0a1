// The page: a digit is drawn, labelled, and the model trained on all that were drawn, with the stock onnxruntime-web package.
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
import { CELLS, Pad, thumbnail } from "./pad.mjs";
import { Trainer, learningRate } from "./trainer.mjs";

const STEPS = 30; // of one click
const element = (id) => document.getElementById(id);
const folder = new URLSearchParams(location.search).get("stages") ?? "stages";

let trainer; // once it is loaded
const pad = new Pad(element("pad"), () => inTurn(showGuess));
const drawings = []; // {pixels, label}
const losses = [];

async function read(file) {
  const answer = await fetch(`${folder}/${file}`);
  if (!answer.ok) throw new Error(`there is no ${folder}/${file}; README.md says how to make it`);
  return new Uint8Array(await answer.arrayBuffer());
}

/** A batch of the model's inputs by name: those of the demo's model. */
function batch(some) {
  const x = new ort.Tensor("float32", some.flatMap(({ pixels }) => [...pixels]), [some.length, 1, CELLS, CELLS]);
  const labels = new ort.Tensor("int64", some.map(({ label }) => BigInt(label)), [some.length]);
  return { x, labels };
}

/** Probabilities of the ten digits, for each drawing. */
async function guess(some) {
  const scores = (await trainer.evaluate(batch(some)))[trainer.plan.losses[0].output].data;
  return some.map((_, i) => {
    const powers = Array.from(scores.slice(10 * i, 10 * i + 10), (score) => Math.exp(score - Math.max(...scores)));
    return powers.map((power) => power / powers.reduce((a, b) => a + b));
  });
}

async function showGuess() {
  const [shares] = pad.empty ? [Array(10).fill(0)] : await guess([{ pixels: pad.pixels(), label: 0 }]);
  for (const [digit, button] of [...element("labels").children].entries()) {
    button.querySelector("i").style.width = `${100 * shares[digit]}%`;
    button.lastChild.textContent = pad.empty ? "" : `${Math.round(100 * shares[digit])} %`;
    button.classList.toggle("best", !pad.empty && shares[digit] === Math.max(...shares));
    button.disabled = pad.empty;
  }
}

/** The drawings, marked by whether the model names them right; returns how many it does. */
async function showDrawings() {
  const shares = drawings.length ? await guess(drawings) : [];
  element("drawings").replaceChildren(...drawings.map(({ pixels, label }, i) => {
    const figure = document.createElement("figure");
    const best = shares[i].indexOf(Math.max(...shares[i]));
    figure.classList.toggle("wrong", best !== label);
    figure.append(thumbnail(pixels), best === label ? `${label}` : `${label}, not ${best}`);
    return figure;
  }));
  for (const id of ["train", "reset", "save"]) element(id).disabled = !drawings.length;
  return shares.filter((share, i) => share.indexOf(Math.max(...share)) === drawings[i].label).length;
}

async function clear() {
  pad.clear();
  await showGuess();
}

async function train() {
  const before = await showDrawings();
  for (let i = 1; i <= STEPS; i++) {
    // Nobody knows how many steps there will be: without an end a schedule stays at its first rate.
    const lr = learningRate(trainer.plan.recipe.learning_rate, trainer.step + 1, Infinity);
    losses.push(await trainer.train(batch(drawings), lr));
    element("status").textContent = `Step ${i} of ${STEPS}: loss ${losses.at(-1).toFixed(4)}`;
    await new Promise((done) => setTimeout(done)); // lets the page show it
  }
  const after = await showDrawings();
  element("status").textContent =
    `${STEPS} steps: loss ${losses.at(-STEPS).toFixed(3)} → ${losses.at(-1).toFixed(3)}. ` +
    `Of ${drawings.length} drawings the model named ${before} right before, and ${after} now. Draw more to see what it learnt.`;
  await showGuess();
}

async function startOver() {
  trainer.load(await read(`${trainer.plan.checkpoint}/step-0/parameters.safetensors`));
  drawings.length = losses.length = 0;
  await showDrawings();
  await clear();
  element("status").textContent = "The model is as it was.";
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([trainer.save()]));
  link.download = "digits.safetensors"; // for `ortc export --restore`
  link.click();
}

// Sessions do one thing at a time, so what a person asks for is done in turn.
let last = Promise.resolve();
function inTurn(task) {
  last = last.then(task).catch((error) => (element("status").textContent = `${error.message ?? error}`));
  return last;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => inTurn(showDrawings).then(() => pad.show()));
for (const [id, task] of Object.entries({ clear, train, reset: startOver, save })) element(id).onclick = () => inTurn(task);

for (let digit = 0; digit < 10; digit++) {
  const button = document.createElement("button");
  button.innerHTML = `<i></i><span>${digit}</span><span></span>`;
  button.setAttribute("aria-label", `This is a ${digit}`);
  button.onclick = () => inTurn(async () => {
    if (pad.empty) return;
    drawings.push({ pixels: pad.pixels(), label: digit });
    await showDrawings();
    await clear();
    element("status").textContent = `Noted as ${digit}: draw another one, or train.`;
  });
  element("labels").append(button);
}

await inTurn(async () => {
  ort.env.wasm.numThreads = 1; // more would need a server that isolates the page from others
  trainer = await Trainer.open(ort, read);
  await showGuess();
  element("status").textContent = "Ready: draw a digit.";
});
globalThis.page = { drawings, losses }; // for whoever looks from the console, and for the test
