// Folding and unfolding: boxes keep their layer and their order, only sizes change.
// The placement is that of layout.py: in each layer the centers nearest to where they were that keep
// order and distances (isotonic regression by pooling adjacent violators).
"use strict";
for (const graph of document.querySelectorAll(".graph")) {
  const NS = "http://www.w3.org/2000/svg";
  const FONT = 12, LINE = 15, PAD = 9, GAP_X = 18, GAP_Y = 30, MARGIN = 16;
  const scene = JSON.parse(graph.querySelector("script").textContent);
  const canvas = graph.querySelector(".canvas");

  function make(name, attributes, parent, text) {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function spread(layer) {
    const blocks = [], offsets = [];
    let offset = 0;
    layer.forEach((box, k) => {
      if (k) offset += (layer[k - 1].W + box.W) / 2 + GAP_X;
      offsets.push(offset);
      const weight = box.title === undefined ? 4 : 1;
      blocks.push([(box.x - offset) * weight, weight, 1]);
      for (let n = blocks.length; n > 1; n = blocks.length) {
        const last = blocks[n - 1], before = blocks[n - 2];
        if (before[0] / before[1] <= last[0] / last[1]) break;
        blocks.pop();
        for (let i = 0; i < 3; i++) before[i] += last[i];
      }
    });
    let k = 0;
    for (const [total, mass, count] of blocks)
      for (let i = 0; i < count; i++, k++) layer[k].X = total / mass + offsets[k];
  }

  function place(level) {
    const boxes = level.boxes;
    for (const box of boxes) {
      box.W = box.w;
      box.H = box.h;
      if (box.inner && box.open) {
        place(box.inner);
        box.W = Math.max(box.w, box.inner.W + 2 * PAD);
        box.H = box.inner.H + 2 * PAD + LINE + 4;
      }
    }
    const layers = level.layers.map((layer) => layer.map((k) => boxes[k]));
    layers.forEach(spread);
    const left = boxes.reduce((least, b) => Math.min(least, b.X - b.W / 2), Infinity);
    let y = 0;
    level.W = 0;
    for (const layer of layers) {
      const tall = layer.reduce((most, b) => Math.max(most, b.H), 0);
      for (const box of layer) {
        box.X -= left;
        box.Y = y + tall / 2;
        if (box.title === undefined) box.H = tall;
        level.W = Math.max(level.W, box.X + box.W / 2);
      }
      y += tall + GAP_Y;
    }
    level.H = Math.max(0, y - GAP_Y);
  }

  function path(way) {
    let x = way[0].X, y = way[0].Y + way[0].H / 2, out = `M${x} ${y}`;
    for (const box of way.slice(1)) {
      const top = box.Y - box.H / 2, middle = (y + top) / 2;
      out += `C${x} ${middle} ${box.X} ${middle} ${box.X} ${top}`;
      x = box.X;
      y = box.Y + box.H / 2;
      if (box.title === undefined) out += `V${y}`;
    }
    return out;
  }

  function draw(level, parent) {
    for (const numbers of level.edges) {
      const way = numbers.map((k) => level.boxes[k]);
      make("path", { d: path(way), fill: "none", stroke: "#94a3b8", "stroke-width": 1.2 }, parent);
      const end = way[way.length - 1], y = end.Y - end.H / 2;
      make("path", { d: `M${end.X - 3.5} ${y - 6}L${end.X} ${y}L${end.X + 3.5} ${y - 6}z`,
        fill: "#94a3b8" }, parent);
    }
    for (const box of level.boxes) if (box.title !== undefined) drawBox(box, parent);
  }

  function drawBox(box, parent) {
    const [fill, line] = scene.colors[box.kind];
    const x = box.X - box.W / 2, y = box.Y - box.H / 2;
    const g = box.node = make("g", {}, parent);
    make("title", {}, g, box.tip || box.title);
    const frame = { x, y, width: box.W, height: box.H, rx: box.kind === "io" ? 14 : 5, fill,
      stroke: line };
    if (box.inner && !box.open) make("rect", { ...frame, x: x + 4, y: y + 4 }, g);
    make("rect", { ...frame, "fill-opacity": box.open ? 0.45 : 1 }, g);
    const sign = box.inner ? (box.open ? "− " : "+ ") : "";
    let at = y + PAD + 10;
    make("text", { x: box.X, y: at, "text-anchor": "middle", "font-weight": 600,
      fill: "#0f172a" }, g, sign + box.title);
    if (box.inner) {
      const open = () => { box.open = !box.open; render(); show(box.node); };
      Object.entries({ "data-toggle": "", tabindex: 0, role: "button",
        "aria-expanded": String(!!box.open) }).forEach(([k, v]) => g.setAttribute(k, v));
      g.addEventListener("click", (event) => { event.stopPropagation(); open(); });
      g.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          event.stopPropagation();
          open();
        }
      });
    }
    if (box.inner && box.open) {
      const left = box.X - box.inner.W / 2, top = y + PAD + LINE + 4;
      draw(box.inner, make("g", { transform: `translate(${left},${top})` }, g));
      return;
    }
    for (const [text, kind] of box.chips) {
      at += LINE;
      const dot = kind !== "note";
      if (dot) make("circle", { cx: x + PAD + 3, cy: at - 4, r: 3.5,
        fill: scene.colors[kind][0] }, g);
      make("text", { x: dot ? x + PAD + 11 : box.X, y: at, "font-size": 11, fill: "#334155",
        "text-anchor": dot ? "start" : "middle" }, g, text);
    }
  }

  function render() {
    const root = scene.root;
    place(root);
    const w = root.W + 2 * MARGIN, h = root.H + 2 * MARGIN;
    const svg = document.createElementNS(NS, "svg");
    Object.entries({ width: w, height: h, viewBox: `0 0 ${w} ${h}`, "font-size": FONT })
      .forEach(([k, v]) => svg.setAttribute(k, v));
    draw(root, make("g", { transform: `translate(${MARGIN},${MARGIN})` }, svg));
    const { scrollLeft, scrollTop } = canvas;
    canvas.replaceChildren(svg);
    canvas.scrollTo(scrollLeft, scrollTop);
  }

  function show(node) {
    const r = node.getBoundingClientRect(), c = canvas.getBoundingClientRect();
    canvas.scrollLeft += r.left + r.width / 2 - c.left - c.width / 2;
    if (r.top < c.top || r.bottom > c.bottom) canvas.scrollTop += r.top - c.top - MARGIN;
    node.focus({ preventScroll: true });
  }

  function all(level, open) {
    for (const box of level.boxes) if (box.inner) { box.open = open; all(box.inner, open); }
  }

  for (const button of graph.querySelectorAll("button[data-open]"))
    button.addEventListener("click", () => { all(scene.root, !!button.dataset.open); render(); });
  render();
  const start = scene.root.boxes[0];
  if (start) canvas.scrollLeft = start.X + MARGIN - canvas.clientWidth / 2;
}
