// What users type into the search of the site, and the page that should come first:
//   node docs/search_queries.mjs docs/_build/html docs/search_queries.json
// The site's own search runs here: Sphinx's script on the index that the build wrote.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [site, questions] = process.argv.slice(2);
const element = { innerText: "", children: [], removeChild() {}, firstChild: null };
const context = vm.createContext({
  document: {
    addEventListener() {},
    getElementById: () => element,
    documentElement: { dataset: { content_root: "./" } },
  },
  location: { search: "" },
  localStorage: { setItem() {} },
  URLSearchParams,
  _ready() {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
});
context.window = context;
const load = (name) => vm.runInContext(readFileSync(join(site, name), "utf-8"), context);
for (const name of ["documentation_options", "language_data", "searchtools"])
  load(`_static/${name}.js`);
load("searchindex.js");

const FIRST = 3;
const found = vm.runInContext(
  "(query) => { const p = Search._parseQuery(query);" +
    " return Search._performSearch(p[0], p[1], p[2], p[3], p[4]).reverse(); }",
  context,
);
let missed = 0;
let first = 0;
const pairs = Object.entries(JSON.parse(readFileSync(questions, "utf-8")));
for (const [query, page] of pairs) {
  const pages = [...new Set(found(query).map((result) => result[0]))];
  const place = pages.indexOf(page) + 1;
  if (place === 1) first += 1;
  if (place >= 1 && place <= FIRST) continue;
  missed += 1;
  console.error(`${query}: ${page} is ${place ? `at place ${place}` : "not found"}; first: ${pages.slice(0, 3).join(", ")}`);
}
console.log(`${pairs.length} queries: ${first} have their page first, ${missed} do not have it among the first ${FIRST}`);
process.exitCode = missed ? 1 : 0;
