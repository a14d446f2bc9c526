/* Gives each cell the title of its column, which site.css shows on phones; the first cell of a row needs none. */
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, at) => { if (at) cell.dataset.label = titles[at] ?? ""; });
  }
});
