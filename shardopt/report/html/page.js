"use strict";
(() => {
  document.documentElement.classList.add("js");

  const sortKey = (cell) =>
    cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.toLowerCase();
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });

  for (const button of document.querySelectorAll("table.sortable th button")) {
    button.addEventListener("click", () => {
      const title = button.parentElement;
      const body = title.closest("table").tBodies[0];
      const descending = title.getAttribute("aria-sort") === "ascending";
      for (const other of title.parentElement.children) other.removeAttribute("aria-sort");
      title.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const keyed = [...body.rows].map((row) => [sortKey(row.cells[title.cellIndex]), row]);
      keyed.sort(([a], [b]) => (descending ? compare(b, a) : compare(a, b)));
      body.append(...keyed.map(([, row]) => row));
    });
  }

  // "0-3, 6" holds 2
  const holds = (ranks, rank) =>
    ranks.split(", ").some((run) => {
      const [first, last] = run.split("-").map(Number);
      return first <= rank && rank <= (last ?? first);
    });
  const plan = document.getElementById("plan");
  const [text, type, rank] = ["filter", "type", "rank"].map((id) => document.getElementById(id));
  const titles = [...plan.tHead.rows[0].cells].map((cell) => cell.textContent);
  const [typeColumn, ranksColumn] = [titles.indexOf("type"), titles.indexOf("ranks")];
  const filter = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of plan.tBodies[0].rows) {
      const content = row.textContent.toLowerCase();
      const cell = (column) => row.cells[column].textContent;
      const fits =
        words.every((word) => content.includes(word)) &&
        (!type.value || cell(typeColumn) === type.value) &&
        (rank.value === "" || holds(cell(ranksColumn), Number(rank.value)));
      row.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    const all = plan.tBodies[0].rows.length;
    document.getElementById("count").textContent = `${shown} of ${all} shown`;
  };
  for (const input of [text, type, rank]) input.addEventListener("input", filter);
  filter();

  const lanes = document.querySelector(".lanes");
  const frame = lanes.parentElement;
  // a name is shown where all of it fits its bar, and a time before the end of the ruler
  const labels = [...lanes.querySelectorAll("svg text")];
  const right = (element) => element.getBoundingClientRect().right;
  const fit = () => {
    const fits = labels.map((label) => right(label) + 2 <= right(label.parentElement));
    labels.forEach((label, i) => (label.style.visibility = fits[i] ? "" : "hidden"));
  };
  fit();
  window.addEventListener("resize", fit);
  lanes.addEventListener("toggle", fit, true);
  document.getElementById("zoom").addEventListener("input", (event) => {
    const middle = (frame.scrollLeft + frame.clientWidth / 2) / frame.scrollWidth;
    lanes.style.setProperty("--zoom", 2 ** Number(event.target.value));
    frame.scrollLeft = middle * frame.scrollWidth - frame.clientWidth / 2;
    fit();
  });

  const tip = document.getElementById("tip");
  document.addEventListener("pointermove", (event) => {
    const bar = event.target.closest("[data-tip]");
    tip.style.display = bar ? "block" : "none";
    if (!bar) return;
    tip.textContent = bar.dataset.tip;
    const room = document.documentElement;
    const left = Math.min(event.clientX + 12, room.clientWidth - tip.offsetWidth - 4);
    const below = event.clientY + 16;
    const fits = below + tip.offsetHeight < room.clientHeight;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 8}px`;
  });
})();
