// Uses the page of examples/javascript in a headless browser as a person would: node examples_page.mjs FOLDER URL BROWSER [PICTURES]
// FOLDER has the node_modules; PICTURES is a folder for screenshots. Prints what happened, as JSON.
import { mkdtempSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import path from "node:path";

const [folder, url, browser, pictures] = process.argv.slice(2);
const { chromium } = createRequire(path.resolve(folder, "package.json"))("playwright-core");

// Shapes that no digit has, in units of the drawing pad, and what they shall be called from now on.
const SHAPES = [
  [3, [[0.2, 0.8], [0.5, 0.15], [0.8, 0.8], [0.2, 0.8]]], // a triangle
  [3, [[0.15, 0.85], [0.45, 0.2], [0.85, 0.75], [0.15, 0.85]]],
  [8, [[0.2, 0.5], [0.8, 0.5], [0.5, 0.5], [0.5, 0.2], [0.5, 0.8]]], // a cross
  [8, [[0.15, 0.45], [0.85, 0.5], [0.5, 0.5], [0.55, 0.15], [0.45, 0.85]]],
];
const UNSEEN = [3, [[0.25, 0.75], [0.55, 0.2], [0.75, 0.85], [0.25, 0.75]]];

const profile = mkdtempSync(path.join(tmpdir(), "ortc-chromium-"));
const quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];
const context = await chromium.launchPersistentContext(profile, {
  executablePath: browser,
  args: [...quiet, "--disable-component-update", "--disable-sync"],
  viewport: { width: 1100, height: 760 },
});
const page = context.pages()[0] ?? (await context.newPage());
const problems = [];
const requests = [];
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
page.on("request", (request) => requests.push(request.url()));

async function draw(points) {
  const box = await page.locator("#pad").boundingBox();
  const place = ([x, y]) => [box.x + x * box.width, box.y + y * box.height];
  await page.mouse.move(...place(points[0]));
  await page.mouse.down();
  for (const point of points.slice(1)) await page.mouse.move(...place(point), { steps: 12 });
  await page.mouse.up();
  await page.waitForFunction(() => document.querySelector("#labels .best"));
}

const guess = async () => (await page.locator("#labels .best").innerText()).replaceAll(/\s+/g, " ");
const status = () => page.locator("#status").innerText();

async function picture(name) {
  if (!pictures) return;
  for (const [width, height, size] of [[1100, 760, "wide"], [390, 844, "phone"]])
    for (const colorScheme of ["light", "dark"]) {
      await page.setViewportSize({ width, height });
      await page.emulateMedia({ colorScheme });
      await page.waitForTimeout(300);
      await page.screenshot({ path: path.join(pictures, `${name}-${size}-${colorScheme}.png`), fullPage: true });
    }
  await page.setViewportSize({ width: 1100, height: 760 });
}

try {
  await page.goto(url);
  await page.waitForFunction(() => !document.querySelector("#status").textContent.startsWith("Loading"));
  const told = [await status()];
  for (const [label, points] of SHAPES) {
    await draw(points);
    await page.getByLabel(`This is a ${label}`).click();
    await page.waitForFunction(() => document.querySelector("#train").disabled === false);
  }
  await draw(UNSEEN[1]);
  const before = await guess();
  await picture("before");
  await page.locator("#train").click();
  await page.waitForFunction(() => document.querySelector("#status").textContent.includes("before, and"), null, { timeout: 60_000 });
  told.push(await status());
  const after = await guess();
  const { drawings, losses } = await page.evaluate(() => ({
    drawings: page.drawings.map(({ pixels, label }) => ({ pixels: [...pixels], label })),
    losses: page.losses,
  }));
  await picture("after");
  const [download] = await Promise.all([page.waitForEvent("download"), page.locator("#save").click()]);
  await download.saveAs(path.join(folder, "page.safetensors"));
  console.log(JSON.stringify({ told, before, after, unseen: UNSEEN[0], drawings, losses, problems, requests }));
} finally {
  await context.close();
  rmSync(profile, { recursive: true, force: true });
}
