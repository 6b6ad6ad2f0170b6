"""The graph of a block as SVG: by graphviz where it is installed, else laid out here."""

from __future__ import annotations

import itertools
import logging
import shutil
from xml.etree import ElementTree

import networkx as nx

from stepfx.html_report.elements import element, text
from stepfx.html_report.layers import Layout, layered

log = logging.getLogger(__name__)

HEIGHT, GAP = 34.0, (14.0, 20.0)
CHARACTER = 6.6  # width of a digit of the label's font, in pixels
MARGIN = 8.0
SVG = "http://www.w3.org/2000/svg"


def block_svg(graph: nx.DiGraph) -> str:
    """Return a graph of `block_graph` as an SVG element, coloured by the page's style."""
    return by_graphviz(graph) or by_layers(graph)


def by_graphviz(graph: nx.DiGraph) -> str | None:
    """Return the drawing of `dot`, or None without graphviz or pydot."""
    if shutil.which("dot") is None:
        return None
    try:
        import pydot
    except ImportError:
        return None
    drawing = pydot.Dot("block", ranksep="0.25", nodesep="0.15")
    drawing.set_node_defaults(
        shape="box", style="rounded", fontname="sans-serif", fontsize="11", height="0.4"
    )
    drawing.set_edge_defaults(arrowsize="0.5", fontsize="8", fontname="sans-serif")
    for number, data in graph.nodes(data=True):
        label = "\\n".join(filter(None, (data["label"], data["detail"])))
        kind = f"op-{data['kind']}"
        drawing.add_node(pydot.Node(f"n{number}", label=f'"{label}"', **{"class": kind}))
    for a, b, data in graph.edges(data=True):
        drawing.add_edge(pydot.Edge(f"n{a}", f"n{b}", label=f'"{data["label"]}"'))
    try:
        return _in_our_style(drawing.create_svg(), graph)
    except (OSError, AssertionError) as error:  # pydot asserts that dot ended well
        log.info("graphviz failed (%s); the block is laid out without it", error)
        return None


def _in_our_style(drawn: bytes, graph: nx.DiGraph) -> str:
    """Leave colours and fonts of graphviz's SVG to the page; say in a title what a box is."""
    root = ElementTree.fromstring(drawn)
    hints = {f"n{number}": data["hint"] for number, data in graph.nodes(data=True)}
    for part in root.iter():
        for name in ("fill", "stroke", "font-family", "font-size", "id"):
            part.attrib.pop(name, None)
        title = part.find(f"{{{SVG}}}title")
        if title is None:
            continue
        if title.text in hints:
            title.text = hints[title.text]
        else:
            part.remove(title)
    ElementTree.register_namespace("", SVG)
    root.set("class", "block-graph")
    root.set("role", "img")
    for name in ("width", "height"):
        root.set(name, root.get(name, "").removesuffix("pt"))
    for polygon in root[0].findall(f"{{{SVG}}}polygon"):
        root[0].remove(polygon)  # the background
    return ElementTree.tostring(root, encoding="unicode")


def by_layers(graph: nx.DiGraph) -> str:
    """Return the drawing of the layout of this package."""
    widths = {
        number: max(len(data["label"]), 0.9 * len(data["detail"]), 4) * CHARACTER + 14
        for number, data in graph.nodes(data=True)
    }
    layout = layered(graph, widths, HEIGHT, GAP)
    boxes = [
        _box(data, layout.centres[number], widths[number])
        for number, data in graph.nodes(data=True)
    ]
    edges = [_edge(layout, (a, b), data["label"]) for a, b, data in graph.edges(data=True)]
    width, height = layout.width + 2 * MARGIN, layout.height + 2 * MARGIN
    return element(
        "svg",
        *edges,
        *boxes,
        class_="block-graph",
        role="img",
        viewBox=f"{-MARGIN:g} {-MARGIN:g} {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        xmlns=SVG,
    )


def _box(data: dict[str, str], centre: tuple[float, float], width: float) -> str:
    x, y = centre
    lines = [line for line in (data["label"], data["detail"]) if line]
    first = y + 3.5 - 6.5 * (len(lines) - 1)
    labels = [
        element(
            "text",
            text(line),
            x=f"{x:.1f}",
            y=f"{first + 13 * i:.1f}",
            text_anchor="middle",
            class_="detail" if i else None,
        )
        for i, line in enumerate(lines)
    ]
    box = element(
        "rect",
        x=f"{x - width / 2:.1f}",
        y=f"{y - HEIGHT / 2:.1f}",
        width=f"{width:.1f}",
        height=f"{HEIGHT:g}",
        rx="5",
    )
    title = element("title", text(data["hint"]))
    return element("g", title, box, *labels, class_=f"node op-{data['kind']}")


def _edge(layout: Layout, edge: tuple[object, object], label: str) -> str:
    points = layout.routes[edge]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        path += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    x, y = points[-1]
    tip = f"M{x - 3:.1f} {y - 5:.1f}L{x:.1f} {y:.1f}L{x + 3:.1f} {y - 5:.1f}"
    number = (
        element("text", text(label), x=f"{x + 5:.1f}", y=f"{y - 4:.1f}", class_="detail")
        if label
        else ""
    )
    return element("g", element("path", d=path + tip), number, class_="edge")
