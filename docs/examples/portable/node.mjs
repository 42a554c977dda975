// Steps in node: node node.mjs STEP.json, with {folder, runtime, batches: [[{rows, data, label}]], scalars}.
import { readFile, writeFile } from "node:fs/promises";
import { Step } from "./step.mjs";

const job = JSON.parse(await readFile(process.argv[2], "utf8"));
const ort = await import(job.runtime ?? "onnxruntime-node");
const read = async (name) => new Uint8Array(await readFile(`${job.folder}/${name}`));
const step = await Step.open(ort, read, { intraOpNumThreads: 1 });
const costs = [];
for (const batches of job.batches) costs.push(await step.run(batches, job.scalars));
await writeFile(`${job.folder}/state.safetensors`, step.save());
console.log(JSON.stringify(costs.flat()));
