"use strict";
// What the pages do beyond links and forms, which work without it: sort a table's rows, and ask for two results before they are compared.

function key(row, column) {
  const cell = row.cells[column];
  const value = cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value;
  const number = Number(value);
  return value === "" ? null : Number.isNaN(number) ? value.toLowerCase() : number;
}

function before(a, b) {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1; // what is missing comes last, whichever way
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a < b ? -1 : a > b ? 1 : 0;
}

function sort(table, heading) {
  const column = heading.cellIndex;
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows).sort((one, other) => {
    const a = key(one, column), b = key(other, column);
    return a === null || b === null ? before(a, b) : down ? before(b, a) : before(a, b);
  });
  body.append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const heading of table.tHead.querySelectorAll("th")) {
    if (!heading.textContent.trim() || heading.classList.contains("tick")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sort(table, heading));
  }
}

for (const form of document.querySelectorAll("form.pick-two")) {
  const button = form.querySelector("button[type=submit]");
  const told = form.querySelector("[role=status]");
  const tell = () => {
    const count = form.querySelectorAll("input[name=result]:checked").length;
    button.disabled = count !== 2;
    told.textContent = count === 2 ? "" : `${count} of 2 results picked`;
  };
  form.addEventListener("change", tell);
  tell();
}
