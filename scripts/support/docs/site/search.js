// SPDX-License-Identifier: MIT
// Search in the headings and texts of all pages. The index is loaded at the first use, as a script, because pages that
// are opened as files may not fetch others. `?q=words` in the address searches at once.
"use strict";
(() => {
  const input = document.getElementById("search"), found = document.getElementById("found");
  const up = document.body.dataset.up;
  let loading = null;

  const load = () => loading ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = up + "index.js";
    script.onload = () => resolve(window.sections.map(([url, title, heading, text]) =>
      ({ url, title, heading, text, low: [heading, title, text].map((s) => s.toLowerCase()) })));
    document.head.append(script);
  });

  // How well a section answers a word: a heading counts more than the page's title, and this more than the text.
  const score = ({ low: [heading, title, text] }, word) =>
    heading === word ? 100 : heading.split(/[^\w]+/).includes(word) ? 40 : heading.includes(word) ? 20 :
      title.includes(word) ? 8 : text.includes(word) ? 1 : 0;

  async function search() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return void (found.hidden = true);
    const sections = await load();
    const hits = [];
    for (const section of sections) {
      const scores = words.map((word) => score(section, word));
      if (Math.min(...scores) > 0) hits.push({ section, total: scores.reduce((a, b) => a + b) });
    }
    hits.sort((a, b) => b.total - a.total);
    found.replaceChildren(...hits.slice(0, 20).map(({ section }) => {
      const item = document.createElement("li"), link = document.createElement("a"), where = document.createElement("small");
      link.href = up + section.url;
      link.textContent = section.heading;
      where.textContent = section.title;
      item.append(link, " ", where);
      return item;
    }));
    if (!hits.length) found.textContent = "nothing found";
    found.hidden = false;
  }

  input.addEventListener("input", search);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") found.querySelector("a")?.click();
    if (event.key === "Escape") { input.value = ""; search(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== input) { event.preventDefault(); input.focus(); }
  });
  const asked = new URLSearchParams(location.search).get("q");
  if (asked) { input.value = asked; search(); }
})();
