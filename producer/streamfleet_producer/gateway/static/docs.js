"use strict";
// The description as a page: operations by tag, each with what it takes and gives.
const element = (name, text = "", kind = "") => Object.assign(document.createElement(name), { textContent: text, className: kind });

function typeOf(schema, schemas, depth) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return depth > 3 || !schemas[name] ? name : typeOf(schemas[name], schemas, depth);
  }
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const forms = schema.anyOf ?? schema.oneOf;
  if (forms) return forms.map((form) => typeOf(form, schemas, depth)).join(" | ");
  if (schema.properties) {
    const indent = "  ".repeat(depth + 1);
    const lines = Object.entries(schema.properties).map(([name, value]) => {
      const needed = schema.required?.includes(name) ? "" : "?";
      const standard = value.default !== undefined && value.default !== null ? `  = ${JSON.stringify(value.default)}` : "";
      return `${indent}${name}${needed}: ${typeOf(value, schemas, depth + 1)}${standard}`;
    });
    return lines.length ? `{\n${lines.join("\n")}\n${"  ".repeat(depth)}}` : "{}";
  }
  if (schema.type === "array" && (schema.items || schema.prefixItems)) {
    const inner = schema.items ? typeOf(schema.items, schemas, depth) : schema.prefixItems.map((item) => typeOf(item, schemas, depth)).join(", ");
    return `[${inner}]`;
  }
  return Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type ?? "any";
}

function block(parent, title, text) {
  parent.append(element("div", title, "soft"), element("pre", text));
}

function shown(method, path, operation, schemas) {
  const details = element("details");
  const summary = element("summary");
  summary.append(element("b", method.toUpperCase()), element("code", path), element("span", operation.summary, "soft"));
  details.append(summary);
  if (operation.parameters?.length) {
    block(details, "parameters", operation.parameters.map((parameter) =>
      `${parameter.in} ${parameter.name}${parameter.required ? "" : "?"}: ${typeOf(parameter.schema, schemas, 0)}${parameter.description ? `   ${parameter.description}` : ""}`).join("\n"));
  }
  for (const [type, content] of Object.entries(operation.requestBody?.content ?? {})) {
    block(details, `body, ${type}`, typeOf(content.schema ?? {}, schemas, 0));
  }
  for (const [status, response] of Object.entries(operation.responses)) {
    if (status >= "300") continue;
    for (const [type, content] of Object.entries(response.content ?? {})) {
      block(details, `${status}, ${type}`, typeOf(content.schema ?? {}, schemas, 0));
    }
  }
  block(details, "errors", Object.entries(operation.responses).filter(([status]) => status >= "300")
    .map(([status, response]) => `${status}  ${response.description}`).join("\n"));
  return details;
}

async function main() {
  const state = document.getElementById("state");
  try {
    const said = await (await fetch("openapi.json")).json();
    const sections = new Map();
    for (const [path, methods] of Object.entries(said.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        const tag = operation.tags[0];
        if (!sections.has(tag)) {
          sections.set(tag, element("section"));
          sections.get(tag).append(element("h2", tag));
        }
        sections.get(tag).append(shown(method, path, operation, said.components.schemas));
      }
    }
    document.getElementById("operations").append(...sections.values());
    state.textContent = `version ${said.info.version}`;
  } catch (error) {
    state.textContent = `cannot be read: ${error.message}`;
    state.className = "bad";
  }
}

main();
