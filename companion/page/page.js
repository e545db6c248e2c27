"use strict";
const all = (query, within = document) => [...within.querySelectorAll(query)];

// Tables: a button in each head sorts by the recorded number, or by the text.
for (const table of all("table.sort")) {
  const body = table.tBodies[0], rows = [...body.rows];
  all("th", table.tHead).forEach((head, i) => {
    const cells = rows.map(row => row.cells[i]);
    const numbers = cells.filter(cell => cell?.dataset.v);
    if (2 * numbers.length > rows.length) numbers.push(head);
    numbers.forEach(cell => cell.classList.add("n"));
    if (rows.length < 3 || !head.textContent) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    const value = row => row.cells[i].dataset.v !== undefined ? +row.cells[i].dataset.v : row.cells[i].textContent;
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      all("th", table.tHead).forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
        : typeof a === typeof b ? a.localeCompare(b, "en", {numeric: true}) : typeof a === "number" ? -1 : 1;
      body.append(...[...rows].sort((a, b) => order(value(a), value(b)) * (down ? -1 : 1)));
    });
  });
}

// What scrolls in its own box can be reached by the keyboard; measured once the page is shown, all before any is changed.
const scrolls = () => {
  const boxes = all(".wide, .exercise pre").map(box => [box, box.scrollWidth > box.clientWidth]);
  for (const [box, wide] of boxes) wide ? box.setAttribute("tabindex", "0") : box.removeAttribute("tabindex");
};
const later = () => setTimeout(scrolls, 50);
for (const when of ["load", "resize"]) addEventListener(when, later);
document.addEventListener("toggle", later, true);

// Search: words are compared by their stems and by what is written for them here; a rare one counts for more, and so does one
// of a technique's name, title, question, symptom or answer. What nobody wrote is taken for the nearest word of a name, title,
// question or symptom. Found is what has half of the words asked for, and a quarter of the most.
const field = document.getElementById("q"), found = document.getElementById("found"), list = found.querySelector("ul");
const spaced = within => {  // what neighbours say, apart: a cell of a table touches the next one
  const walk = document.createTreeWalker(within, NodeFilter.SHOW_TEXT), said = [];
  while (walk.nextNode()) said.push(walk.currentNode.data);
  return said.join(" ");
};
const text = (query, within) => all(query, within).map(each => each.textContent).join(" ");
const split = text => text.toLowerCase().replace(/(\d),(?=\d{3})|(\d) (?=[kmgtb]\b)/g, "$1$2").match(/[a-z0-9]+(\.\d+[a-z]*)?/g) ?? [];
const stem = word => word.replace(/(?<=...)(ations?|ings?|e[dr]s?|est|ies|es?|s|y)$/, "").replace(/([a-z])\1$/, "$1");
const minor = new Set(split("a an and are as at be by can do does for from has have how i in is it me my of on or should than that the to use what when which why with"));
const alike = ["size shape length", "different another varying variable changing", "one single 1 1x1", "decode generation token inference", "latency time speed",
  "fp8 float8", "bf16 bfloat16", "gemm matmul product", "ordinary plain pointer", "identical same bits", "optimizer adamw", "norm normalize",
  "attention sdpa", "accurate accuracy", "quantize quantization int4 int8"].map(group => split(group).map(stem));
const known = all("article").map(each => ({
  href: "#" + each.id, name: each.id, title: text("h3 > a:not(.tag)", each), says: text(".question", each), leads: [], words: text(".answer, figcaption, .line.wins", each), of: each,
  topic: each.closest("section").querySelector("h2").textContent,
}));
for (const way of all(".ways:not(.contents) li")) for (const link of all("a", way)) {
  known.find(each => each.href === link.getAttribute("href"))?.leads.push(way.firstElementChild.textContent);
}
for (const claim of all("tr[id]")) {
  const [says, verdict, measured] = claim.cells;
  known.push({href: "#" + claim.id, name: "claim", title: "claim", says: says.textContent, leads: [], words: spaced(measured), verdict: verdict.firstElementChild});
}
const newWords = each => {  // of the title, as its name has some of them already
  const held = each.name.split("_").map(stem);
  return split(each.title).filter(word => !held.includes(stem(word))).join(" ");
};
const parts = each => each.parts ??= [
  [4, each.name + " " + each.name.replaceAll("_", "")], [2, newWords(each)], [3, each.says], [3, each.leads.join(" ")], [2, each.words],
  [2, each.of ? `${each.of.dataset.group} ${each.topic}` : ""], [.5, each.of ? spaced(each.of) : ""],
].map(([weight, text]) => [weight, split(text).map(word => [word, stem(word)])]);
const points = (each, asked) => parts(each).reduce((sum, [weight, held]) => sum + weight * Math.max(0, ...held.map(([word, stem]) =>
  stem === asked ? 1 : asked.length > 2 && word.startsWith(asked) ? .6 : 0)), 0);
const apart = (a, b) => {  // letters that differ: one more, one less, another, or two in each other's place
  let old, row = [...Array(b.length + 1).keys()];
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      next[j] = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] !== b[j - 1]));
      if (old && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) next[j] = Math.min(next[j], old[j - 2] + 1);
    }
    [old, row] = [row, next];
  }
  return row[b.length];
};
const nearest = asked => {
  const words = new Set(known.filter(each => each.of).flatMap(each => parts(each).slice(0, 4)).flatMap(([, held]) => held.flat()));
  const near = [...words].map(word => [apart(asked, word), word]).sort(([a], [b]) => a - b)[0];
  return asked.length > 4 && near[0] <= (asked.length > 6 ? 2 : 1) ? near[1] : "";
};
const score = word => {
  const asked = stem(word), others = alike.filter(group => group.includes(asked)).flat();
  const scores = known.map(each => Math.max(points(each, asked), ...others.map(other => .7 * points(each, other))));
  const rare = Math.log(1 + known.length / (1 + scores.filter(Boolean).length));
  return scores.map((one, i) => rare * one * (known[i].name === "claim" ? .6 : 1));
};
const look = () => {
  const asked = [...new Set(split(field.value))], major = asked.filter(word => !minor.has(word)), words = major.length ? major : asked, taken = [];
  const scores = words.map(word => {
    const own = score(word), near = own.some(Boolean) ? "" : nearest(word);
    if (near) taken.push(near);
    return near ? score(near) : own;
  });
  const sums = known.map((_, i) => scores.reduce((sum, each) => sum + each[i], 0)), most = Math.max(...sums);
  const hits = known.map((each, i) => [sums[i], each, scores.filter(each => each[i]).length])
    .filter(([sum, , count]) => sum > most / 4 && 2 * count >= words.length).sort((a, b) => b[0] - a[0]).map(([, each]) => each);
  found.hidden = !words.length;
  document.getElementById("count").textContent = words.length ? `${hits.length > 12 ? "12 of " : ""}${hits.length} found` + (taken.length ? `, with ${taken.join(", ")}` : "") : "";
  list.replaceChildren(...hits.slice(0, 12).map(hit => {
    const item = document.createElement("li"), link = document.createElement("a"), says = document.createElement("small");
    link.href = hit.href;
    says.textContent = [...(hit.topic ? [hit.topic] : []), hit.says, ...hit.leads].join(" \u00b7 ");
    const named = document.createElement("code");
    named.className = "name";
    named.textContent = hit.of ? hit.name : "";
    link.append(hit.title, ...(hit.of ? [" ", named] : []), ...(hit.verdict ? [": ", hit.verdict.cloneNode(true)] : []), says);
    item.append(link);
    return item;
  }));
};
const close = () => { field.value = ""; look(); };
field.addEventListener("input", look);
field.addEventListener("keydown", event => {
  if (event.key === "Enter") list.querySelector("a")?.click();
  if (event.key === "ArrowDown") { list.querySelector("a")?.focus(); event.preventDefault(); }
});
found.addEventListener("keydown", event => {
  const links = all("a", list), at = links.indexOf(document.activeElement) + {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (!Number.isNaN(at)) { (links[at] ?? field).focus(); event.preventDefault(); }
});
list.addEventListener("click", close);
addEventListener("keydown", event => {
  if (event.key === "Escape" && !found.hidden) { close(); field.focus(); }
  if (event.key === "/" && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) { field.focus(); event.preventDefault(); }
});

// On paper nothing of a lesson is folded; studies stay as the reader left them.
matchMedia("print").addEventListener("change", event => event.matches && all("details:not(.study)").forEach(each => each.open = true));
