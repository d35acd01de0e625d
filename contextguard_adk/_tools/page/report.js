"use strict";
// Draws the charts. What comes from the session is set as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const toggle = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const isDark = () => (root.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
  const labels = data.prompt.map((_, index) => index + 1);
  const count = (value) => value.toLocaleString("en-US");
  const dollars = (value) => `$${Number(value.toPrecision(3))}`;
  // The index of the chosen call of each chart, by the chart's id.
  const chosen = { tokens: 0, made: 0, bill: 0 };
  let charts = [];

  function createFact(name, value, markColor) {
    const item = document.createElement("div");
    item.className = value.length > 30 ? "wide" : "";
    for (const [tag, text] of [["dt", name], ["dd", value]]) {
      item.append(Object.assign(document.createElement(tag), { textContent: text }));
    }
    if (markColor) {
      const mark = document.createElement("i");
      mark.style.background = markColor;
      item.firstChild.prepend(mark);
    }
    return item;
  }

  function createLinkToCompaction(index) {
    const item = createFact("compaction", "");
    const link = { href: `#compaction-${index + 1}`, textContent: "show what it did" };
    item.lastChild.append(Object.assign(document.createElement("a"), link));
    return item;
  }

  function listValues(chart, index) {
    const isShown = ({ label, data: values }) =>
      values[index] && !["compaction", "compaction (simulated)", "threshold", "context window"].includes(label);
    return chart.data.datasets.filter(isShown).map((dataset) => {
      const value = dataset.data[index];
      const text = dataset.yAxisID === "money" ? dollars(value) : count(value);
      return createFact(dataset.label, text, dataset.backgroundColor);
    });
  }

  // Marks a call in a chart, and shows what is known of it below the chart: a text in
  // the chart would hide lines.
  function choose(chart, index) {
    const id = chart.canvas.id;
    chosen[id] = index;
    chart.draw();

    const facts = Object.entries(data.facts[index]).map(([name, value]) => createFact(name, value));
    const [call, agent, ...others] = facts;
    document.getElementById(`${id}-facts`).replaceChildren(
      call, agent,
      ...listValues(chart, index),
      ...(data.compactions[index] ? [createLinkToCompaction(index)] : []),
      ...(id === "tokens" ? others : []),
    );
  }

  const markOfChosenCall = {
    id: "chosen",
    beforeDatasetsDraw(chart) {
      const x = chart.scales.x.getPixelForValue(chosen[chart.canvas.id]);
      const { top, bottom } = chart.chartArea;
      chart.ctx.save();
      chart.ctx.strokeStyle = color("muted");
      chart.ctx.beginPath();
      chart.ctx.moveTo(x, top);
      chart.ctx.lineTo(x, bottom);
      chart.ctx.stroke();
      chart.ctx.restore();
    },
  };

  function line(label, values, name, more) {
    return {
      type: "line", label, data: values, borderColor: color(name), backgroundColor: color(name),
      borderWidth: 2, pointRadius: 0, pointStyle: "line", spanGaps: true, ...more,
    };
  }

  function listTokenLines() {
    const agents = [...new Set(data.agents)];
    const palette = ["blue", "green", "purple", "teal", "pink"];
    const own = (values, agent) => values.map((v, i) => (data.agents[i] === agent ? v : null));
    const recorded = data.isGuarded ? "with the guard (recorded)" : "without the guard (recorded)";
    const lines = agents.map((agent, number) =>
      line(agents.length > 1 ? agent : recorded, own(data.prompt, agent), palette[number % 5], { order: 2 }),
    );
    if (data.other) {
      const label = data.isGuarded ? "without the guard (simulated)" : "with the guard (simulated)";
      lines.push(
        line(label, data.other, "muted", { borderDash: [5, 4], borderWidth: 1.5, order: 3 }),
      );
    }
    const guarded = data.isGuarded ? data.prompt : data.other;
    if (guarded && data.compactions.includes(true)) {
      const label = data.isGuarded ? "compaction" : "compaction (simulated)";
      lines.push(
        line(label, guarded.map((v, i) => (data.compactions[i] ? v : null)), "purple", {
          showLine: false, pointRadius: 6, pointHoverRadius: 8, pointStyle: "triangle", pointRotation: 180, order: 1,
        }),
      );
    }
    const step = { borderDash: [2, 3], borderWidth: 1.5, stepped: true, order: 4 };
    lines.push(line("threshold", data.threshold, "orange", step));
    lines.push(line("context window", data.window, "red", { ...step, borderDash: [] }));
    return lines;
  }

  function listBillBars() {
    const bar = (label, values, name) => ({
      type: "bar", label, data: values, backgroundColor: color(name), stack: "tokens", order: 2, pointStyle: "rect",
      barPercentage: 1, categoryPercentage: labels.length > 60 ? 1 : 0.8,
    });
    const bars = [
      bar("cached input", data.cached, "sky"),
      bar("uncached input", data.uncached, "blue"),
      bar("output", data.output, "green"),
      bar("summaries", data.summaries, "orange"),
    ];
    const money = (label, values, more) =>
      values ? [line(label, values, "purple", { yAxisID: "money", order: 1, ...more })] : [];
    const other = data.isGuarded ? "money without the guard (simulated)" : "money with the guard (simulated)";
    const dashed = { borderDash: [5, 4], borderWidth: 1.5 };
    return [
      ...bars.filter((each) => each.data.some(Boolean)),
      ...money("money", data.money),
      ...(data.money && data.other ? money(other, data.otherMoney, dashed) : []),
    ];
  }

  function listKindBars() {
    const palette = ["blue", "orange", "green", "purple", "teal", "pink", "sky", "red", "muted", "olive"];
    return Object.entries(data.kinds).map(([label, values], number) => ({
      type: "bar", label, data: values, backgroundColor: color(palette[number % palette.length]), stack: "kinds",
      pointStyle: "rect", barPercentage: 1, categoryPercentage: labels.length > 60 ? 1 : 0.8,
    }));
  }

  // Far above the window a line is cut off, so that what is below stays visible.
  function findTop() {
    const top = 2 * Math.max(...data.window);
    return Math.max(...data.prompt, ...(data.other || [])) > 1.5 * top ? top : undefined;
  }

  function draw(id, datasets, hasMoney, isStacked, max) {
    const canvas = document.getElementById(id);
    const axis = (title, format, more) => ({
      beginAtZero: true, title: { display: true, text: title },
      ticks: { callback: format, maxTicksLimit: 8 }, ...more,
    });
    const scales = {
      x: { title: { display: true, text: "model call" }, stacked: isStacked, grid: { display: false },
        ticks: { maxTicksLimit: 12, maxRotation: 0 } },
      y: axis(max ? "tokens (cut off)" : "tokens", count, { stacked: isStacked, max }),
    };
    if (hasMoney) {
      scales.money = axis("US dollars", dollars, { position: "right", grid: { display: false } });
    }
    const chart = new Chart(canvas, {
      data: { labels, datasets },
      plugins: [markOfChosenCall],
      options: {
        animation: false, responsive: true, maintainAspectRatio: false, scales,
        interaction: { mode: "index", intersect: false },
        onHover: (_, items) => items.length && choose(chart, items[0].index),
        onClick: (_, items) => {
          const card = items.length && document.getElementById(`compaction-${items[0].index + 1}`);
          if (card) card.focus();
        },
        plugins: {
          legend: { position: "bottom", labels: { usePointStyle: true, boxWidth: 24 } },
          tooltip: { enabled: false },
        },
      },
    });
    canvas.onkeydown = (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -labels.length, End: labels.length };
      if (!(event.key in steps)) return;
      event.preventDefault();
      const index = chosen[id] + steps[event.key];
      choose(chart, Math.min(Math.max(index, 0), labels.length - 1));
    };
    choose(chart, chosen[id]);
    return chart;
  }

  function drawAll() {
    for (const chart of charts) chart.destroy();
    Chart.defaults.color = color("muted");
    Chart.defaults.borderColor = color("line");
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    toggle.textContent = isDark() ? "Light" : "Dark";
    charts = [
      draw("tokens", listTokenLines(), false, false, findTop()),
      draw("made", listKindBars(), false, true),
      draw("bill", listBillBars(), Boolean(data.money), true),
    ];
  }

  toggle.hidden = false;
  toggle.onclick = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    drawAll();
  };
  prefersDark.onchange = drawAll;
  drawAll();
})();
