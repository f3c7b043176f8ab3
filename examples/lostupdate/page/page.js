// Plays the stories, all at once: at position n the first n events have
// happened. What is played is read from the page itself; without this script
// the page shows how everything ended.
(() => {
  "use strict";

  const player = document.getElementById("player");
  const control = (name) => player.querySelector(`[data-do="${name}"]`);
  const slider = player.querySelector("input");
  const stories = [...player.querySelectorAll(".story")].map((figure) => {
    const table = document.getElementById(figure.dataset.story);
    const picture = figure.querySelector(".picture");
    return {
      figure,
      picture,
      veil: picture.querySelector(".veil"),
      now: picture.querySelector(".now"),
      caption: figure.querySelector(".caption"),
      top: Number(picture.dataset.top),
      pitch: Number(picture.dataset.pitch),
      rows: [...table.tBodies[0].rows],
      times: [...table.querySelectorAll("time")].map((time) => parseFloat(time.textContent)),
    };
  });
  const last = Math.max(...stories.map((story) => story.rows.length));

  // How long the player stays at an event, in ms: longer where the run waited.
  const stay = Array.from({ length: last }, (_, n) => {
    const waits = stories.map(({ times }) => (times[n + 1] - times[n] || 0) * 1000);
    return 900 + Math.min(2400, 4 * Math.max(...waits));
  });
  const stayAtEnd = 4000;

  let position = 0;
  let running = false;
  let rested = 0; // ms at the end
  let previous; // time of the frame before

  function show() {
    const step = Math.floor(position);
    for (const story of stories) {
      const { rows } = story;
      const mine = Math.min(step, rows.length);
      const edge = Math.min(position, rows.length) * story.pitch;
      story.veil.setAttribute("y", story.top + edge);
      story.now.setAttribute("y", story.top + (mine - 1) * story.pitch);
      story.now.style.visibility = mine > 0 && step < last ? "" : "hidden";
      story.figure.classList.toggle("playing", step < last);
      if (story.shown === mine) continue;
      story.shown = mine;
      rows.forEach((row, n) => { row.ariaCurrent = n === mine - 1 ? "step" : null; });
      const words = mine > 0 ? [...rows[mine - 1].cells].slice(0, 3).map((cell) => cell.textContent) : ["", "", ""];
      story.caption.replaceChildren(words[0], " ", Object.assign(document.createElement("b"), { textContent: words[1] }), " ", words[2]);
    }
    slider.value = position;
    slider.setAttribute("aria-valuetext", `event ${step} of ${last}`);
    player.querySelector(".count").textContent = `${step} of ${last}`;
  }

  function go(to) {
    position = Math.min(last, Math.max(0, to));
    rested = 0;
    show();
  }

  function frame(time) {
    if (!running) return;
    const passed = Math.min(100, time - (previous ?? time)); // a page in the background gets no frames
    previous = time;
    if (position < last) {
      go(position + passed / stay[Math.floor(position)]);
    } else if ((rested += passed) > stayAtEnd) {
      if (control("loop").ariaPressed === "true") go(0);
      else return pause();
    }
    requestAnimationFrame(frame);
  }

  function play() {
    if (running) return;
    if (position >= last) go(0);
    running = true;
    previous = undefined;
    state();
    requestAnimationFrame(frame);
  }

  function pause() {
    running = false;
    state();
  }

  function state() {
    player.classList.toggle("running", running);
    control("play").ariaLabel = running ? "Pause" : "Play";
    // What changes by itself is not for reading aloud.
    for (const { caption } of stories) caption.ariaLive = running ? "off" : "polite";
  }

  const actions = {
    play: () => (running ? pause() : play()),
    back: () => (pause(), go(Math.ceil(position) - 1)),
    forward: () => (pause(), go(Math.floor(position) + 1)),
    first: () => (pause(), go(0)),
    last: () => (pause(), go(last)),
    loop: () => {
      const loop = control("loop");
      loop.ariaPressed = String(loop.ariaPressed !== "true");
    },
  };
  const keys = { " ": "play", ArrowLeft: "back", ArrowRight: "forward", Home: "first", End: "last", l: "loop", L: "loop" };

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    if (event.key === " " && event.target.closest("button")) return; // it is clicked
    event.preventDefault();
    actions[keys[event.key]]();
  });
  for (const button of player.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => actions[button.dataset.do]());
  }
  slider.addEventListener("input", () => {
    pause();
    go(Number(slider.value));
  });
  for (const { picture, top, pitch } of stories) {
    const seek = (event) => {
      // A finger that moves scrolls the page.
      if (event.type === "pointermove" && (event.pointerType === "touch" || !(event.buttons & 1))) return;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
      pause();
      go(Math.floor((at.y - top) / pitch) + 1);
    };
    picture.addEventListener("click", seek);
    picture.addEventListener("pointermove", seek);
  }

  slider.max = last;
  for (const element of player.querySelectorAll("[hidden]")) element.hidden = false;
  player.classList.add("scripted");
  state();
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
    go(last);
  } else {
    play();
    show();
  }
})();
