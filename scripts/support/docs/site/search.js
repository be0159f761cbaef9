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

  // Words that are not searched for, because they say nothing about the subject; and the stem of a word.
  const empty = new Set(("a an and are at by can do does for from how i in is it me my of on or that the this to use "
    + "what when with").split(" "));
  const stem = (word) => word.length > 5 ? word.replace(/(ing|ed|es|s|e)$/, "") : word.replace(/s$/, "");

  // How well a section answers a word: a heading counts more than the page's title, and the title more than the
  // text.
  const score = ({ low: [heading, title, text] }, word) => {
    const words = heading.split(/[^\w]+/);
    return words.includes(word) ? 40 : words.some((w) => w.startsWith(word)) ? 30 : heading.includes(word) ? 20 :
      title.includes(word) ? 6 : text.includes(word) ? 3 : 0;
  };

  async function search() {
    const asked = input.value.toLowerCase().split(/[\s?!,]+/).filter(Boolean);
    if (!asked.length) return void (found.hidden = true);
    const kept = asked.filter((word) => !empty.has(word)).map(stem), words = kept.length ? kept : asked;
    const sections = await load();
    const hits = [];
    for (const section of sections) {
      const scores = words.map((word) => score(section, word));
      const share = scores.filter((s) => s > 0).length / words.length;
      // A section that lacks words falls far behind; half of the words are enough to be listed.
      const exact = section.low[0].trim() === words.join(" ") || section.low[0].trim().endsWith("." + words.join(" "));
      // Recipes and chapters answer tasks, so of equal hits they come first.
      const task = /^(cookbook|tutorial)\/(?!index)/.test(section.url) ? 1.5 : 1;
      const total = task * scores.reduce((a, b) => a + b) * share ** 3 + (exact ? 100 : 0);
      if (share >= 0.5) hits.push({ section, total });
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
