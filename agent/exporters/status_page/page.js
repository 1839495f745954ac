// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
//
// Draws /status.json as html.py drew the first picture. Only text nodes and attributes are ever made from it, so that
// no name becomes markup.
"use strict";
(() => {
	const EVERY_MS = 2000;
	const HELD_MS = 60000;
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

	const graph = (drawn, box) => {
		const made = document.createElementNS(SVG, "svg");
		const named = { viewBox: box, preserveAspectRatio: "none", role: "img", "aria-label": drawn.label };
		Object.entries(named).forEach(([key, value]) => made.setAttribute(key, value));
		if (drawn.level) made.append(path(drawn.level, "level"));
		made.append(path(drawn.line));
		return made;
	};

	const cell = (said, box) => {
		const text = element("span", {}, said.text);
		return element("td", { class: said.kind }, said.graph ? element("div", {}, graph(said.graph, box), text) : text);
	};

	const section = () => element("section", {}, element("h2", {}),
		element("div", { class: "scroll" }, element("table", {}, element("thead", {}), element("tbody", {}))),
		element("p", { class: "remark" }));

	const draw = (page) => {
		const main = document.querySelector("main");
		document.getElementById("host").textContent = page.host;
		document.getElementById("headline").textContent = page.headline;
		document.getElementById("notes").replaceChildren(
			...page.notes.map((note) => element("p", { class: note.kind }, note.text)));
		while (main.children.length > page.tables.length) main.lastChild.remove();
		while (main.children.length < page.tables.length) main.append(section());
		page.tables.forEach((table, index) => {
			const at = main.children[index];
			const columns = table.columns.map((said) => element("th", { class: said.kind, scope: "col" }, said.text));
			at.querySelector("h2").textContent = table.title;
			at.querySelector("thead").replaceChildren(element("tr", {}, ...columns));
			at.querySelector("tbody").replaceChildren(...table.rows.map(
				(row) => element("tr", {}, ...row.map((said) => cell(said, page.box)))));
			at.querySelector(".remark").textContent = table.remark;
		});
	};

	let held = 0;
	const look = async () => {
		held = getSelection().isCollapsed ? 0 : held + EVERY_MS; // somebody is copying, or has left it selected
		if (!document.hidden && (held === 0 || held > HELD_MS)) {
			try {
				const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(5 * EVERY_MS) });
				if (!answer.ok) throw new Error(answer.statusText);
				draw(await answer.json());
				document.body.classList.remove("silent");
			} catch {
				document.body.classList.add("silent");
				document.getElementById("notes").replaceChildren(
					element("p", { class: "bad" }, "the agent does not answer: these figures are old"));
			}
		}
		setTimeout(look, EVERY_MS);
	};
	setTimeout(look, EVERY_MS);
})();
