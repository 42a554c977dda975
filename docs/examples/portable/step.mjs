// A portable step on onnxruntime-common: onnxruntime-node, onnxruntime-web (wasm, WebGPU), react-native.
const ARRAYS = { float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, bool: Uint8Array, float16: Uint16Array };
const COLUMNS = ["data", "label", "sample_weight"], COSTS = ["loss", "penalty"];
const count = (shape) => shape.reduce((a, b) => a * b, 1);

export class Step {
  // ort: the module; read(name): gives the bytes of a file of the folder; options: of the session.
  static async open(ort, read, options = {}) {
    const step = new Step();
    const [graph, manifest, state] = await Promise.all(["step.onnx", "manifest.json", "state.safetensors"].map(read));
    step.ort = ort;
    step.manifest = JSON.parse(new TextDecoder().decode(manifest));
    for (const part of step.manifest.not_portable) console.warn(`not in the step: ${part.name}: ${part.why}`);
    step.session = await ort.InferenceSession.create(graph, { logSeverityLevel: 3, ...options });
    step.moving = step.manifest.step.filter((i) => i.in && i.out);
    const start = 8 + Number(new DataView(state.buffer, state.byteOffset).getBigUint64(0, true));
    step.head = state.slice(0, start);
    step.header = JSON.parse(new TextDecoder().decode(step.head.subarray(8)));
    step.state = {};
    for (const i of step.moving) {
      const [first, end] = step.header[i.in].data_offsets;
      const values = new ARRAYS[i.dtype](state.slice(start + first, start + end).buffer);
      step.state[i.in] = new ort.Tensor(i.dtype, values, i.shape);
    }
    return step;
  }

  // A tensor of a column: numbers in the order of the rows, of a number of rows.
  tensor(item, values, rows) {
    const make = item.dtype === "int64" ? (v) => BigInt(v) : Number;
    const array = values instanceof ARRAYS[item.dtype] ? values : ARRAYS[item.dtype].from(values, make);
    const known = item.shape.slice(1).map((d) => (typeof d === "number" ? d : 0));
    const open = known.indexOf(0); // one size that only the data know
    if (open >= 0) known[open] = array.length / rows / (count(known.filter((d) => d)) || 1);
    return new this.ort.Tensor(item.dtype, array, [rows, ...known]);
  }

  // One run: a batch {rows, data, label} (or by names of columns) for each of manifest.batches_per_run,
  // and numbers for optional inputs, such as {learning_rate: 0.01}. Gives loss + penalty of its steps.
  async run(batches, scalars = {}) {
    const feeds = { ...this.state };
    for (const item of this.manifest.step) {
      if (COLUMNS.includes(item.role)) {
        const batch = batches[item.batch];
        feeds[item.in] = this.tensor(item, batch[item.of] ?? batch[item.role], batch.rows);
      } else if (this.session.inputNames.includes(item.in) && "default" in item) {
        const given = [scalars[item.in] ?? item.default].flat(), size = count(item.shape);
        const values = Float64Array.from({ length: size }, (_, k) => Number(String(given[k % given.length]).replace("inf", "Infinity")));
        feeds[item.in] = new this.ort.Tensor("float64", values, item.shape);
      } else if (item.in in scalars) { // these packages leave out optional inputs
        throw new Error(`${item.in} cannot be given: export the step with --required-inputs`);
      }
    }
    const out = await this.session.run(feeds);
    for (const i of this.moving) this.state[i.in] = out[i.out];
    const costs = this.manifest.step.filter((i) => COSTS.includes(i.role)).map((i) => out[i.out].data);
    return Array.from(costs[0], (_, k) => costs.reduce((sum, cost) => sum + cost[k], 0));
  }

  // The bytes of state.safetensors after the training, for `ortflex apply-state`.
  save() {
    const end = Math.max(...this.moving.map((i) => this.header[i.in].data_offsets[1]));
    const bytes = new Uint8Array(this.head.length + end);
    bytes.set(this.head);
    for (const i of this.moving) {
      const { buffer, byteOffset, byteLength } = this.state[i.in].data;
      bytes.set(new Uint8Array(buffer, byteOffset, byteLength), this.head.length + this.header[i.in].data_offsets[0]);
    }
    return bytes;
  }

  // A graph of the model with the present weights: feeds by the names of its inputs.
  async predict(session, feeds) {
    const own = Object.fromEntries(session.inputNames.filter((n) => n in this.state).map((n) => [n, this.state[n]]));
    return session.run({ ...own, ...feeds });
  }
}
