"use strict";
const all = (query, within = document) => [...within.querySelectorAll(query)];

// Tables: a button in each head sorts by the recorded number, or by the text.
for (const table of all("table.sort")) {
  const body = table.tBodies[0], rows = [...body.rows];
  all("th", table.tHead).forEach((head, i) => {
    const cells = rows.map(row => row.cells[i]);
    if (cells.some(cell => cell?.dataset.v)) [head, ...cells].forEach(cell => cell?.classList.add("n"));
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

// Search: a technique is found by the words of its name, its question, its answer and the symptoms that lead to it; first
// what has most of the words asked for, and at least half of them.
const field = document.getElementById("q"), found = document.getElementById("found"), list = found.querySelector("ul");
const text = (query, within) => all(query, within).map(each => each.textContent).join(" ");
const known = all("article").map(each => ({
  href: "#" + each.id, name: each.id, says: text(".question", each), words: text(".answer, figcaption, .line.wins", each),
}));
for (const way of all(".ways li")) for (const link of all("a", way)) {
  const hit = known.find(each => each.href === link.getAttribute("href"));
  if (hit) hit.says += " " + way.firstElementChild.textContent;
}
for (const claim of all("tr[id]")) {
  known.push({href: "#" + claim.id, name: "claim", says: claim.cells[0].textContent, words: claim.cells[2].textContent});
}
const minor = new Set("a an the is are it i my me to of or and for in with which what when why how do does should can".split(" "));
const score = (each, words) => words.reduce((sum, word) => sum + (each.name.includes(word) ? 4 : each.says.toLowerCase().includes(word) ? 3
  : each.words.toLowerCase().includes(word) ? 2 : 0) , 0);
const look = () => {
  const asked = field.value.toLowerCase().split(/[^a-z0-9_.]+/).filter(Boolean), major = asked.filter(word => !minor.has(word));
  const words = (major.length ? major : asked).map(word => word.length > 4 ? word.replace(/(es|s|ing|ed)$/, "") : word);
  const hits = known.map(each => [score(each, words), each]).filter(([points]) => points && points >= 1.5 * words.length)
    .sort((a, b) => b[0] - a[0]).map(([, each]) => each);
  found.hidden = !words.length;
  document.getElementById("count").textContent = words.length ? `${hits.length} found` : "";
  list.replaceChildren(...hits.slice(0, 12).map(hit => {
    const item = document.createElement("li"), link = document.createElement("a"), says = document.createElement("small");
    link.href = hit.href;
    says.textContent = hit.says;
    link.append(hit.name, says);
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
