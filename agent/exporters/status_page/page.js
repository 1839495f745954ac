// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
//
// Draws /status.json every two seconds. Only text nodes and attributes are ever made from it, so that no name becomes
// markup.
"use strict";
(() => {
	const REFRESH_MS = 2000;
	const SELECTION_MS = 60000; // for so long a selection keeps the page as it is
	const SVG = "http://www.w3.org/2000/svg";

	const element = (name, attributes, ...children) => {
		const made = document.createElement(name);
		Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
		made.append(...children);
		return made;
	};

	const path = (data, kind) => {
		const made = document.createElementNS(SVG, "path");
		made.setAttribute("d", data);
		if (kind) made.setAttribute("class", kind);
		return made;
	};

	const svg = (graph, box) => {
		const made = document.createElementNS(SVG, "svg");
		const attributes = { viewBox: box, preserveAspectRatio: "none", role: "img", "aria-label": graph.label };
		Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
		if (graph.level) made.append(path(graph.level, "level"));
		made.append(path(graph.line));
		return made;
	};

	const td = (cell, box) => {
		const text = element("span", {}, cell.text);
		return element("td", { class: cell.kind }, cell.graph ? element("div", {}, svg(cell.graph, box), text) : text);
	};

	const section = () => element("section", {}, element("h2", {}),
		element("div", { class: "scroll" }, element("table", {}, element("thead", {}), element("tbody", {}))),
		element("p", { class: "remark" }));

	const notes = (cells) => document.getElementById("notes").replaceChildren(
		...cells.map((cell) => element("p", { class: cell.kind }, cell.text)));

	const draw = (page) => {
		const main = document.querySelector("main");
		document.title = "GPU Warden: " + page.host;
		document.getElementById("host").textContent = page.host;
		document.getElementById("headline").textContent = page.headline;
		notes(page.notes);
		while (main.children.length > page.tables.length) main.lastChild.remove();
		while (main.children.length < page.tables.length) main.append(section());
		page.tables.forEach((table, index) => {
			const drawn = main.children[index];
			const columns = table.columns.map((cell) => element("th", { class: cell.kind, scope: "col" }, cell.text));
			drawn.querySelector("h2").textContent = table.title;
			drawn.querySelector("thead").replaceChildren(element("tr", {}, ...columns));
			drawn.querySelector("tbody").replaceChildren(...table.rows.map(
				(row) => element("tr", {}, ...row.map((cell) => td(cell, page.box)))));
			drawn.querySelector(".remark").textContent = table.remark;
		});
	};

	let selectedMs = 0;
	const refresh = async () => {
		selectedMs = getSelection().isCollapsed ? 0 : selectedMs + REFRESH_MS; // a reader copies, or left it selected
		if (!document.hidden && (selectedMs === 0 || selectedMs > SELECTION_MS)) {
			try {
				const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(5 * REFRESH_MS) });
				if (!answer.ok) throw new Error(answer.statusText);
				draw(await answer.json());
				document.body.classList.remove("silent");
			} catch {
				const stale = document.querySelector("section") ? ": these figures are old" : "";
				document.body.classList.add("silent");
				notes([{ kind: "bad", text: "the agent does not answer" + stale }]);
			}
		}
		setTimeout(refresh, REFRESH_MS);
	};
	document.querySelector("main").replaceChildren(); // what is said where no script runs
	refresh();
})();
